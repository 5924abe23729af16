// FusedRouter's maps in the router's own launch: for as many choices as fit the list of routing_maps_list.cuh.
//
// The launch is one block, or one cluster of up to 8. Some warps of a block route rows and put each row's choices on
// the list of every block as soon as they are known; the others build the maps from it while the weights are still
// being computed.
#pragma once

#include "kernels/cluster.cuh"
#include "kernels/fused_router_row.cuh"
#include "kernels/routing_maps_list.cuh"

namespace ort_moe {

constexpr int kMapThreads = 128;
constexpr unsigned kMaxClusterBlocks = 8;  // what every device with clusters has

class RouterMaps {
 public:
  static __host__ __device__ size_t SharedBytes(const RouterParams& p) { return p.has_maps ? p.maps.SharedBytes() : 0; }

  // Threads of a block beside those that route.
  static __host__ __device__ int Threads(const RouterParams& p) { return p.has_maps ? kMapThreads : 0; }

  // Every thread of a block makes one and then calls Start(), ahead of its first Publish or Build.
  __device__ RouterMaps(const RouterParams& p, unsigned char* shared)
      : p_(p), shared_(shared), blocks_(p.has_maps ? ClusterBlocks() : 1u) {}

  // Before another block's list is written, that block must be running.
  __device__ void Start() {
    if (blocks_ > 1u) ClusterArrive();
  }

  // By the lane that holds the choice; then whole warps call AwaitBlocks first.
  __device__ void Publish(int64_t row, int32_t rank, int32_t expert) {
    const int32_t slot = static_cast<int32_t>(row) * p_.k + rank;
    uint32_t* key = reinterpret_cast<uint32_t*>(shared_) + slot;
    if (blocks_ == 1u) {
      *key = List::Key(expert, slot);
    } else {
      for (uint32_t block = 0; block < blocks_; ++block) StoreInBlock(block, key, List::Key(expert, slot));
    }
  }

  __device__ void AwaitBlocks() {
    if (blocks_ > 1u) ClusterWait();
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

  // Ends a routing warp: it stays for as long as the cluster's barrier is in use.
  __device__ void Finish() {
    if (blocks_ > 1u) ClusterWait();
  }

  // All of a thread that builds maps; `thread` counts from 0.
  __device__ void Build(int thread) {
    List list(p_.maps, shared_, thread, kBuilders);
    list.Prepare();
    WaitForPrevious();
    AllowNext();
    AwaitBlocks();
    if (blocks_ > 1u) {
      ClusterArrive();
      ClusterWait();
    } else {
      BlockSync(kClosed, static_cast<int>(blockDim.x));
    }
    BlockSync(kBuilders, kMapThreads);  // Prepare() of the others
    list.Build();
  }

 private:
  using List = MapsFromList<kMapThreads>;
  enum Barrier : int { kBuilders = 1, kClosed = 2 };

  const RouterParams& p_;
  unsigned char* shared_;
  const uint32_t blocks_;
};

}  // namespace ort_moe
