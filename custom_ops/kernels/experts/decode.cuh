// Weights of FusedExperts one at a time, for every format: what the kernels without tensor cores multiply.
//
// A reader stands for a row and gives element d of it in float32, without the global scale: code times scale as the
// float32 number that the op promises, for any depth and any block size.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

#include "kernels/common/float_math.h"
#include "kernels/experts/params.cuh"

namespace ort_moe {

__device__ __forceinline__ float E2m1ToFloat(uint32_t code) {  // by its low four bits
  return Mul(BitsToFloat((code & 7u) << 22 | (code & 8u) << 28), 0x1p126f);
}

__device__ __forceinline__ float E4m3ToFloat(uint8_t value) {
  return __half2float(__nv_cvt_fp8_to_halfraw(value, __NV_E4M3));
}

// 2^(value - 127); 0 stands for a subnormal number, 255 for NaN.
__device__ __forceinline__ float E8m0ToFloat(uint8_t value) {
  if (value == 0xff) return NaN();
  return BitsToFloat(value == 0 ? 0x00400000u : static_cast<uint32_t>(value) << 23);
}

// Element d of a row that begins at `row` and holds two elements a byte, the even one in the low bits; other bits
// above.
__device__ __forceinline__ uint32_t Nibble(const uint8_t* row, int d) { return row[d / 2] >> (d % 2 * 4); }

template <typename T>
struct DenseReader {
  const T* row;
  __device__ float operator()(int d) const { return HalfTraits<T>::ToFloat(row[d]); }
};

struct Nvfp4Reader {
  const uint8_t *row, *scales;
  __device__ float operator()(int d) const {
    return Mul(E2m1ToFloat(Nibble(row, d)), E4m3ToFloat(scales[d / static_cast<int>(kNvfp4Block)]));
  }
};

struct Mxfp4Reader {
  const uint8_t *row, *scales;
  __device__ float operator()(int d) const {
    return Mul(E2m1ToFloat(Nibble(row, d)), E8m0ToFloat(scales[d / static_cast<int>(kMxfp4Block)]));
  }
};

template <typename T>
struct Int4Reader {
  const uint8_t* row;
  const T* scales;
  const uint8_t* zero_points;  // or null
  int block_size;
  __device__ float operator()(int d) const {
    const int block = d / block_size;
    const int zero = zero_points == nullptr ? 8 : Nibble(zero_points, block) & 15u;
    const int code = Nibble(row, d) & 15u;
    return Mul(static_cast<float>(code - zero), HalfTraits<T>::ToFloat(scales[block]));
  }
};

template <typename T>
struct Int8Reader {
  const uint8_t* row;
  const T* scales;
  const uint8_t* zero_points;  // or null
  int block_size;
  __device__ float operator()(int d) const {
    const int block = d / block_size;
    const int zero = zero_points == nullptr ? 128 : zero_points[block];
    return Mul(static_cast<float>(row[d] - zero), HalfTraits<T>::ToFloat(scales[block]));
  }
};

struct Fp8Reader {
  const uint8_t* row;
  const float* scales;
  int block_size;
  __device__ float operator()(int d) const { return Mul(E4m3ToFloat(row[d]), scales[d / block_size]); }
};

// Calls f with the reader of row n of an expert's layer; T is the type of the activations.
template <typename T, typename F>
__device__ __forceinline__ float WithReader(WeightFormat format, const LayerParams& layer, int64_t expert, int n,
                                            const F& f) {
  const int64_t at = expert * layer.rows + n;
  const int block_size = layer.block_size;
  const int64_t blocks = (layer.depth + block_size - 1) / block_size;
  const uint8_t* const bytes = layer.weights + at * layer.depth;
  const uint8_t* const nibbles = layer.weights + at * (layer.depth / 2);
  const T* const scales = reinterpret_cast<const T*>(layer.scales) + at * blocks;
  const auto zero_points = [&](int64_t row_bytes) {
    return layer.zero_points == nullptr ? nullptr : layer.zero_points + at * row_bytes;
  };
  switch (format) {
    case WeightFormat::kDense:
      break;
    case WeightFormat::kNvfp4:
      return f(Nvfp4Reader{nibbles, layer.scales + at * blocks});
    case WeightFormat::kMxfp4:
      return f(Mxfp4Reader{nibbles, layer.scales + at * blocks});
    case WeightFormat::kInt4:
      return f(Int4Reader<T>{nibbles, scales, zero_points((blocks + 1) / 2), block_size});
    case WeightFormat::kInt8:
      return f(Int8Reader<T>{bytes, scales, zero_points(blocks), block_size});
    case WeightFormat::kFp8: {
      const int64_t rows_of_blocks = (layer.rows + block_size - 1) / block_size;
      const int64_t scale_row = expert * rows_of_blocks + n / block_size;
      return f(Fp8Reader{bytes, reinterpret_cast<const float*>(layer.scales) + scale_row * blocks, block_size});
    }
  }
  return f(DenseReader<T>{reinterpret_cast<const T*>(layer.weights) + at * layer.depth});
}

}  // namespace ort_moe
