// Keys and values of every layer, in physical blocks of 32 slots.
#pragma once
#include <cstddef>
#include <cstdint>

#include "kernels/kernels.h"

namespace foredraft {

// Of one layer and one kv head: all blocks' keys, [head_dim][32] each, then all blocks' values, [32][head_dim] each.
// The system gives memory as it is first written, page by page: unused blocks cost address space only.
class KVCache {
  public:
    // Throws std::invalid_argument for sizes that cannot be, std::bad_alloc if the address space is not to be had.
    KVCache(int num_layers, int num_kv_heads, int head_dim, int num_blocks, bool half);
    ~KVCache();
    KVCache(const KVCache&) = delete;
    KVCache& operator=(const KVCache&) = delete;

    int num_layers() const { return num_layers_; }
    int num_kv_heads() const { return num_kv_heads_; }
    int head_dim() const { return head_dim_; }
    int num_blocks() const { return num_blocks_; }
    bool half() const { return half_; }
    size_t element_bytes() const { return half_ ? 2 : 4; }
    // Bytes between physical blocks, of keys or of values.
    size_t block_stride() const { return size_t(kSlots) * size_t(head_dim_) * element_bytes(); }

    uint8_t* keys(int layer, int head) { return data_ + area(layer, head); }
    uint8_t* values(int layer, int head) { return data_ + area(layer, head) + size_t(num_blocks_) * block_stride(); }

    // One slot, of one layer, from block and offset to block and offset.
    void copy_slot(int layer, int from_block, int from_slot, int to_block, int to_slot);

  private:
    size_t area(int layer, int head) const {
        return (size_t(layer) * size_t(num_kv_heads_) + size_t(head)) * 2 * size_t(num_blocks_) * block_stride();
    }

    int num_layers_, num_kv_heads_, head_dim_, num_blocks_;
    bool half_;
    size_t bytes_ = 0;
    uint8_t* data_ = nullptr;
};

}  // namespace foredraft
