// Hopper's matrix instruction wgmma: a warpgroup adds a product of 64 x 16 and 16 x N to its sums.
//
// Sums of a thread, with row g = lane / 4 of its warp's 16 and q = lane % 4: d[4 j + i] is row g, column 8 j + 2 q + i,
// and d[4 j + 2 + i] row g + 8. A is 64 rows of 16 elements in shared memory and B N rows.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace ort_moe {

template <int kColumns>
struct Wgmma;

// The first registers of an instruction by name, and the sums that they hold.
#define ORT_MOE_NAMES_4 "%0, %1, %2, %3"
#define ORT_MOE_SUMS_4 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define ORT_MOE_NAMES_8 ORT_MOE_NAMES_4 ", %4, %5, %6, %7"
#define ORT_MOE_SUMS_8 ORT_MOE_SUMS_4, "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define ORT_MOE_NAMES_16 ORT_MOE_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
// clang-format off
#define ORT_MOE_SUMS_16 ORT_MOE_SUMS_8, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
// clang-format on
#define ORT_MOE_NAMES_24 ORT_MOE_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
// clang-format off
#define ORT_MOE_SUMS_24 ORT_MOE_SUMS_16, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
// clang-format on
#define ORT_MOE_NAMES_32 ORT_MOE_NAMES_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
// clang-format off
#define ORT_MOE_SUMS_32 ORT_MOE_SUMS_24, "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
// clang-format on
#define ORT_MOE_NAMES_40 ORT_MOE_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
// clang-format off
#define ORT_MOE_SUMS_40 ORT_MOE_SUMS_32, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
// clang-format on
#define ORT_MOE_NAMES_48 ORT_MOE_NAMES_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
// clang-format off
#define ORT_MOE_SUMS_48 ORT_MOE_SUMS_40, "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
// clang-format on
#define ORT_MOE_NAMES_56 ORT_MOE_NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
// clang-format off
#define ORT_MOE_SUMS_56 ORT_MOE_SUMS_48, "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
// clang-format on
#define ORT_MOE_NAMES_64 ORT_MOE_NAMES_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
// clang-format off
#define ORT_MOE_SUMS_64 ORT_MOE_SUMS_56, "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
// clang-format on
#define ORT_MOE_NAMES_72 ORT_MOE_NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
// clang-format off
#define ORT_MOE_SUMS_72 ORT_MOE_SUMS_64, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
// clang-format on
#define ORT_MOE_NAMES_80 ORT_MOE_NAMES_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
// clang-format off
#define ORT_MOE_SUMS_80 ORT_MOE_SUMS_72, "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
// clang-format on
#define ORT_MOE_NAMES_88 ORT_MOE_NAMES_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
// clang-format off
#define ORT_MOE_SUMS_88 ORT_MOE_SUMS_80, "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87])
// clang-format on

// For `columns` = N: `registers` = N / 2 sums, then the numbers of the operands behind them.
#define ORT_MOE_WGMMA_OF(type, columns, registers, o0, o1, o2)                                                      \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #o2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #columns          \
               "k16.f32." type "." type " {" ORT_MOE_NAMES_##registers "}, %" #o0 ", %" #o1 ", p, 1, 1, 0, 0;\n}\n" \
               : ORT_MOE_SUMS_##registers                                                                           \
               : "l"(a_matrix), "l"(b_matrix), "r"(add));

#define ORT_MOE_WGMMA(columns, registers, o0, o1, o2)                                                                \
  template <>                                                                                                        \
  struct Wgmma<columns> {                                                                                            \
    template <typename T, int kSums>                                                                                 \
    static __device__ __forceinline__ void Issue(float (&d)[kSums], uint64_t a_matrix, uint64_t b_matrix, int add) { \
      if constexpr (kSums < registers) {                                                                             \
        __trap();                                                                                                    \
      } else if constexpr (std::is_same_v<T, __half>) {                                                              \
        ORT_MOE_WGMMA_OF("f16", columns, registers, o0, o1, o2)                                                      \
      } else {                                                                                                       \
        ORT_MOE_WGMMA_OF("bf16", columns, registers, o0, o1, o2)                                                     \
      }                                                                                                              \
    }                                                                                                                \
  };

ORT_MOE_WGMMA(8, 4, 4, 5, 6)
ORT_MOE_WGMMA(16, 8, 8, 9, 10)
ORT_MOE_WGMMA(32, 16, 16, 17, 18)
ORT_MOE_WGMMA(48, 24, 24, 25, 26)
ORT_MOE_WGMMA(64, 32, 32, 33, 34)
ORT_MOE_WGMMA(80, 40, 40, 41, 42)
ORT_MOE_WGMMA(96, 48, 48, 49, 50)
ORT_MOE_WGMMA(112, 56, 56, 57, 58)
ORT_MOE_WGMMA(128, 64, 64, 65, 66)
ORT_MOE_WGMMA(144, 72, 72, 73, 74)
ORT_MOE_WGMMA(160, 80, 80, 81, 82)
ORT_MOE_WGMMA(176, 88, 88, 89, 90)

#undef ORT_MOE_WGMMA
#undef ORT_MOE_WGMMA_OF
#undef ORT_MOE_NAMES_4
#undef ORT_MOE_SUMS_4
#undef ORT_MOE_NAMES_8
#undef ORT_MOE_SUMS_8
#undef ORT_MOE_NAMES_16
#undef ORT_MOE_SUMS_16
#undef ORT_MOE_NAMES_24
#undef ORT_MOE_SUMS_24
#undef ORT_MOE_NAMES_32
#undef ORT_MOE_SUMS_32
#undef ORT_MOE_NAMES_40
#undef ORT_MOE_SUMS_40
#undef ORT_MOE_NAMES_48
#undef ORT_MOE_SUMS_48
#undef ORT_MOE_NAMES_56
#undef ORT_MOE_SUMS_56
#undef ORT_MOE_NAMES_64
#undef ORT_MOE_SUMS_64
#undef ORT_MOE_NAMES_72
#undef ORT_MOE_SUMS_72
#undef ORT_MOE_NAMES_80
#undef ORT_MOE_SUMS_80
#undef ORT_MOE_NAMES_88
#undef ORT_MOE_SUMS_88

}  // namespace ort_moe
