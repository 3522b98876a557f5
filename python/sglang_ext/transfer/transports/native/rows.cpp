// Rows anywhere in a pool to consecutive bytes and back. Addresses are checked by the callers in Python.

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace nb = nanobind;

namespace {

constexpr std::size_t kLineBytes = 64;
constexpr std::size_t kMinUnalignedBytes = 16 * kLineBytes;
// What is fetched ahead of the row that is copied: as much as is under way from memory at a time.
constexpr std::size_t kAheadBytes = 4096;
// Of a longer row the processor fetches the rest by itself.
constexpr std::size_t kMaxPrefetchBytes = 2048;

// Copy to memory that is not read again soon, without first reading what lies there. A row that begins or ends within a
// cache line shares it with others, which does not pay for few lines.
inline void store_past_cache(char *target, const char *source, std::size_t size) {
#if defined(__SSE2__)
    const std::size_t head = (kLineBytes - reinterpret_cast<std::uintptr_t>(target) % kLineBytes) % kLineBytes;
    if (size < kLineBytes || ((head || size % kLineBytes) && size < kMinUnalignedBytes)) {
        std::memcpy(target, source, size);
        return;
    }
    std::memcpy(target, source, head);
    std::size_t at = head;
    for (; at + kLineBytes <= size; at += kLineBytes) {
        const auto *from = reinterpret_cast<const __m128i *>(source + at);
        auto *to = reinterpret_cast<__m128i *>(target + at);
        const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
        const __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
        _mm_stream_si128(to, a);
        _mm_stream_si128(to + 1, b);
        _mm_stream_si128(to + 2, c);
        _mm_stream_si128(to + 3, d);
    }
    std::memcpy(target + at, source + at, size - at);
#else
    std::memcpy(target, source, size);
#endif
}

// Before another thread or process learns that the bytes are there.
inline void end_of_stores() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

void gather(std::uintptr_t pool, std::size_t stride, std::size_t length, std::uintptr_t slots, std::size_t count,
            std::uintptr_t out) {
    const auto *base = reinterpret_cast<const char *>(pool);
    const auto *slot = reinterpret_cast<const std::uint32_t *>(slots);
    auto *target = reinterpret_cast<char *>(out);
    const std::size_t ahead = kAheadBytes / length + 1;
    const std::size_t fetched = length < kMaxPrefetchBytes ? length : kMaxPrefetchBytes;
    for (std::size_t row = 0; row < count; ++row, target += length) {
        if (row + ahead < count) {
            const char *next = base + std::size_t(slot[row + ahead]) * stride;
            for (std::size_t at = 0; at < fetched; at += kLineBytes) __builtin_prefetch(next + at);
        }
        std::memcpy(target, base + std::size_t(slot[row]) * stride, length);
    }
}

void scatter(std::uintptr_t pool, std::size_t stride, std::size_t length, std::uintptr_t slots, std::size_t count,
             std::uintptr_t staged) {
    auto *base = reinterpret_cast<char *>(pool);
    const auto *slot = reinterpret_cast<const std::uint32_t *>(slots);
    const auto *source = reinterpret_cast<const char *>(staged);
    for (std::size_t row = 0; row < count; ++row, source += length)
        store_past_cache(base + std::size_t(slot[row]) * stride, source, length);
    end_of_stores();
}

}  // namespace

NB_MODULE(_rows, module) {
    using release = nb::call_guard<nb::gil_scoped_release>;
    module.attr("SOURCE_DIGEST") = SOURCE_DIGEST;
    module.def("gather", &gather, release());
    module.def("scatter", &scatter, release());
}
