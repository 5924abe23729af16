// FusedRouter's maps in the router's own launch: of one row by routing_maps_set.cuh, of as many as fit the list of
// routing_maps_list.cuh by that.
//
// The launch is one block, or one cluster of up to 8. Some warps of a block route rows and put each row's choices on
// the list of every block as soon as they are known; the others build the maps from it while the weights are still
// being computed.
#pragma once

#include "kernels/common/cluster.cuh"
#include "kernels/common/launch.cuh"
#include "kernels/maps/routing_maps_list.cuh"
#include "kernels/maps/routing_maps_set.cuh"
#include "kernels/router/fused_router_row.cuh"

namespace ort_moe {

constexpr int kMapThreads = 160;           // beside those that route more than one row
constexpr unsigned kMaxClusterBlocks = 8;  // what every device with clusters has
static_assert(MapsFromList<kMapThreads>::kMaxExperts >= kPartials * kChunk);
static_assert(MapsFromSet::kMaxExperts >= kPartials * kChunk);

// Of a block with up to `row_warps` warps for rows.
__host__ __device__ constexpr int MaxThreadsWithMaps(int row_warps, int32_t max_experts) {
  const int one_row = (1 + MapsFromSet::Warps(max_experts)) * kWarp, more = row_warps * kWarp + kMapThreads;
  return one_row > more ? one_row : more;
}

inline int MapThreads(const RouterParams& p) {
  return p.rows == 1 ? MapsFromSet::Warps(p.experts) * kWarp : kMapThreads;
}

// Shared memory of a block, beside its rows' own.
__host__ __device__ inline size_t MapBytes(const RouterParams& p) {
  return p.rows == 1 ? MapsFromSet::SharedBytes(p.experts) : p.maps.SharedBytes();
}

// What a router's kernel calls, in this order: every thread makes one; those that build maps call Build and are done;
// the others call Open behind their WaitForPrevious, Publish and Close while they route, and Finish.
template <bool kMaps>
class RouterMaps {
 public:
  __device__ RouterMaps(const RouterParams& p, unsigned char* shared)
      : p_(p), shared_(shared), blocks_(ClusterBlocks()) {
    if (blocks_ > 1u) ClusterArrive();  // before another block's list is written, that block must be running
  }

  __device__ int row_warps() const { return p_.row_warps; }
  __device__ size_t shared_bytes() const { return MapBytes(p_); }
  __device__ bool BuildsHere() const { return static_cast<int>(threadIdx.x) >= p_.row_warps * kWarp; }

  __device__ void Build() {
    const int thread = static_cast<int>(threadIdx.x) - p_.row_warps * kWarp;
    if (p_.rows == 1) {
      WaitForPrevious();
      AllowNext();
      BlockSync(kClosed, static_cast<int>(blockDim.x));
      return Set().Write(thread / kWarp, static_cast<int>(blockDim.x) / kWarp - 1, p_.k);
    }
    List list(p_.maps, shared_, thread, kBuilders);
    list.Prepare();
    WaitForPrevious();
    AllowNext();
    if (blocks_ > 1u) {
      ClusterWait();
      ClusterArrive();
      ClusterWait();
    } else {
      BlockSync(kClosed, static_cast<int>(blockDim.x));
    }
    list.Build();
  }

  // By whole warps, as are Close and Finish.
  __device__ void Open(bool nothing_to_publish) {
    if (blocks_ > 1u) ClusterWait();
    if (p_.rows == 1) Set().Clear();
    if (nothing_to_publish) Close();
  }

  // By the lane that holds the choice.
  __device__ void Publish(int64_t row, int32_t rank, int32_t expert) {
    if (p_.rows == 1) return Set().Add(rank, expert);
    const int32_t token = static_cast<int32_t>(row), tokens = static_cast<int32_t>(p_.rows);
    const ListedChoice choice(expert, token, rank * tokens + token);
    uint64_t* slot = reinterpret_cast<uint64_t*>(shared_) + choice.row;
    const uint64_t bits = static_cast<uint64_t>(static_cast<uint32_t>(choice.row)) << 32 | choice.key;
    if (blocks_ == 1u) {
      *slot = bits;
    } else {
#pragma unroll 1
      for (uint32_t block = 0; block < blocks_; ++block) StoreInBlock(block, slot, bits);
    }
  }

  // The calling warp has published its last row.
  __device__ void Close() {
    __syncwarp();
    if (blocks_ > 1u) {
      ClusterArrive();
    } else {
      BlockArrive(kClosed, static_cast<int>(blockDim.x));
    }
  }

  // Stays for as long as the cluster's barrier is in use.
  __device__ void Finish() {
    if (blocks_ > 1u) ClusterWait();
  }

 private:
  using List = MapsFromList<kMapThreads>;
  enum Barrier : int { kBuilders = 1, kClosed = 2 };

  __device__ MapsFromSet Set() const { return MapsFromSet(p_.maps.maps, p_.experts, shared_); }

  const RouterParams& p_;
  unsigned char* shared_;
  const uint32_t blocks_;
};

// A kernel without maps: all of it is nothing.
template <>
class RouterMaps<false> {
 public:
  __device__ RouterMaps(const RouterParams&, unsigned char*) {}
  __device__ int row_warps() const { return blockDim.x / kWarp; }
  __device__ size_t shared_bytes() const { return 0; }
  __device__ bool BuildsHere() const { return false; }
  __device__ void Build() {}
  __device__ void Open(bool) {}
  __device__ void Publish(int64_t, int32_t, int32_t) {}
  __device__ void Close() {}
  __device__ void Finish() {}
};

}  // namespace ort_moe
