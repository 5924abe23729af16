// Packed weights times few tokens of an expert: decoded from shared memory into the first operand of mma.sync.
//
// Decoding is what costs here, and wgmma's waits hold it up. So warps multiply on their own: each takes 32 weight rows
// and one half of a stage's columns, decodes a weight once for all tokens and keeps its sums in registers; the two
// halves of a sum meet at the end of a tile. Two blocks run on a multiprocessor, so that one finishes a tile while the
// other multiplies.
//
// Weights are exact in float16, which costs the fewest instructions, and so are the tokens: rows of bfloat16 have
// become float16 before, with a factor for each (prepare.cuh).
//
// A stage holds 128 bytes of each weight row, swizzled by the tensor map, the rows' slots (exact.cuh), and the tokens'
// rows, whose columns lie in the order in which decoded weights meet them (Position; prepare.cuh), each by one bulk
// copy and with 16 bytes behind it, so that eight rows' vectors lie in different banks. Units of 32 columns take two
// instructions.
#pragma once

#include "kernels/experts/gemm/exact.cuh"
#include "kernels/experts/gemm/params.cuh"

namespace ort_moe {

// T: of the rows in memory.
template <typename CodeOf, typename T>
struct SparseOperand {
  using Element = T;
  using Code = CodeOf;
  static constexpr int kGroups = 2;  // of 64 weight rows in a block
  static constexpr int kBlocksOnProcessor = 2;
  static constexpr int kMaxTokens = 32;
  static constexpr int kRowBytes = 128, kBoxDepth = kRowBytes;
  static constexpr int kDepth = kRowBytes * 8 / Code::kBits, kBoxColumns = kDepth;
  static constexpr int kTokenBytes = kDepth * sizeof(T);
  static constexpr int kTokenPitch = kTokenBytes + 16;  // from a token's row to the next
  static constexpr int kRows = kGroups * 64;
  static constexpr int kBoxBytes = kRows * kRowBytes;
  static constexpr int kZeroSlotsAt = kBoxBytes + kRows * kScaleSlotBytes;
  static constexpr int kTokensAt = kZeroSlotsAt + (Code::kHasZeroPoints ? kRows * kZeroSlotBytes : 0);
  static constexpr int kWeightBytes = kTokensAt + kGemmAlignment;  // and what lies behind the tokens' rows
  static constexpr int kBlocks = 1, kDecoders = 0;
  static constexpr bool kSparse = true;  // few rows of an expert; x in another order of columns
  static constexpr bool kConverts = std::is_same_v<T, __nv_bfloat16>;
  static_assert(kWeightBytes % kGemmAlignment == 0 && kMaxTokens * (kTokenPitch - kTokenBytes) <= kGemmAlignment);

  // Of a warpgroup: by turns in two halves, four sums of each lane of its warps.
  static constexpr int kExchangeBytes = 2 * 4 * 4 * kLanes * static_cast<int>(sizeof(float));

  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 96, kDecoderRegisters = 0;  // of a thread

  static constexpr CUtensorMapSwizzle kSwizzle = CU_TENSOR_MAP_SWIZZLE_128B;
  static constexpr CUtensorMapDataType kMapType = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  static int64_t RowBytes(int64_t depth) { return depth * Code::kBits / 8; }
  static int64_t BoxUnits(int64_t depth) { return RowBytes(depth); }

  // Where a column lies.
  static __device__ __forceinline__ int Position(int column) {
    return Code::kBits == 4 ? column / 32 * 32 + column % 4 * 8 + column / 8 % 4 * 2 + column / 4 % 2
                            : column / 16 * 16 + column / 2 % 2 * 8 + column / 4 % 4 * 2 + column % 2;
  }
};

}  // namespace ort_moe
