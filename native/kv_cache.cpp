#include "kv_cache.h"

#include <sys/mman.h>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

namespace foredraft {

KVCache::KVCache(int num_layers, int num_kv_heads, int head_dim, int num_blocks, bool half)
    : num_layers_(num_layers), num_kv_heads_(num_kv_heads), head_dim_(head_dim), num_blocks_(num_blocks), half_(half) {
    if (num_blocks < 1 || num_blocks > INT32_MAX / kSlots)
        throw std::invalid_argument("a cache has 1.." + std::to_string(INT32_MAX / kSlots) + " blocks, got " + std::to_string(num_blocks));
    const size_t areas = 2 * size_t(num_layers) * size_t(num_kv_heads);
    if (__builtin_mul_overflow(areas * block_stride(), size_t(num_blocks), &bytes_)) throw std::bad_alloc();
    int flags = MAP_PRIVATE | MAP_ANONYMOUS;
#if defined(MAP_NORESERVE)
    flags |= MAP_NORESERVE;
#endif
    void* p = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
#if defined(MADV_NOHUGEPAGE)
    madvise(p, bytes_, MADV_NOHUGEPAGE);  // a huge page would make one written slot take two megabytes an area
#endif
    data_ = static_cast<uint8_t*>(p);
}

KVCache::~KVCache() { munmap(data_, bytes_); }

void KVCache::copy_slot(int layer, int from_block, int from_slot, int to_block, int to_slot) {
    const size_t element = element_bytes(), row = size_t(head_dim_) * element;
    for (int head = 0; head < num_kv_heads_; ++head) {
        uint8_t *k = keys(layer, head), *v = values(layer, head);
        const uint8_t* k_from = k + size_t(from_block) * block_stride() + size_t(from_slot) * element;
        uint8_t* k_to = k + size_t(to_block) * block_stride() + size_t(to_slot) * element;
        for (int d = 0; d < head_dim_; ++d)
            std::memcpy(k_to + size_t(d * kSlots) * element, k_from + size_t(d * kSlots) * element, element);
        std::memmove(v + size_t(to_block) * block_stride() + size_t(to_slot) * row,
                     v + size_t(from_block) * block_stride() + size_t(from_slot) * row, row);
    }
}

}  // namespace foredraft
