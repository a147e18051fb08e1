// Holds threads that compute pieces of products beside those of an op, which wait for no helper.
//
// llama.cpp's threads wait for each other after every op. If another process takes the core of one
// of them, all stand still for milliseconds. A helper may lose its core at any time: it writes the
// products of a piece into a buffer of its own, and a thread of the op copies them. What a helper
// has begun and not finished when nothing else is left to do, a thread of the op computes again,
// and the helper's own result is ignored. As all compute the same bits, nobody can see who did it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "platform/aligned_bytes.hpp"
#include "platform/core_of_thread.hpp"
#include "platform/helper_threads.hpp"
#include "platform/own_process.hpp"
#include "products/product_kernels.hpp"
#include "products/product_pieces.hpp"

namespace entropykv {

class ProductHelpers {
public:
    explicit ProductHelpers(const ProductTable& kernels);

    std::size_t bytes() const;
    // Makes room for ops of this many pieces, and for n helpers; wakes them. No op may be running.
    // Throws std::bad_alloc.
    void wake(int n, int most_pieces);
    // Returns when no helper reads weights or tokens any more.
    void rest() noexcept;
    int awake() const { return awake_; }

    // The following functions are called within an op, by its threads.

    // Lets helpers take pieces; one thread calls this, before the others may begin. Returns false
    // if there are no helpers, or the op has more pieces than there is room for.
    bool offer(const ProductPieces& pieces) noexcept;
    // Tells helpers that the core of the calling thread is in use: there, they would keep it from
    // its work.
    void note_core() noexcept;
    // Claims a piece for a thread of the op; false if a helper has it.
    bool claim(int piece) noexcept;
    // Copies the products of pieces that helpers have finished to where they belong.
    void collect(const ProductPieces& pieces) noexcept;
    // Claims a piece if a helper had begun it, and copies its products; true if the helper has not
    // finished it, so that the caller must compute it; otherwise false.
    bool take_back(const ProductPieces& pieces, int piece) noexcept;

private:
    // Holds the products of one piece: `ready` says of which piece and op, or is 0.
    struct alignas(64) Slot {
        std::atomic<std::uint64_t> ready{0};
        AlignedBytes products;
    };
    static constexpr int kSlots = 2;  // so that a helper need not wait until the first is copied
    struct Helper {
        AlignedBytes tile;
        Slot slots[kSlots];
    };
    // Describes the task of the current op, which helpers may read while the next one is written.
    struct Offer {
        std::atomic<WeightType> type;
        std::atomic<const std::byte*> weights;
        std::atomic<std::size_t> weights_stride;
        std::atomic<int> n_rows, n_values, n_tokens;
        std::atomic<const std::byte*> rounded;
    };

    bool help(int helper) noexcept;
    void leave_used_core() noexcept;
    bool read_offer(std::uint64_t op, ProductTask& task, const std::byte*& rounded) const noexcept;
    int free_slot(const Helper& helper, std::uint64_t op) const noexcept;
    Slot& slot(int number) { return helpers_[index(number / kSlots)].slots[number % kSlots]; }
    bool replace_owner(int piece, std::uint64_t owner, std::uint64_t by) noexcept;
    void copy(const ProductPieces& pieces, int piece, Slot& from) noexcept;
    static std::size_t index(int i) { return static_cast<std::size_t>(i); }

    const ProductTable& kernels_;
    std::deque<Helper> helpers_;
    int awake_ = 0;
    // Names the owner of every piece. The upper bits are the number of the op; the lower ones say
    // that the piece belongs to nobody, to a thread of the op, or to a slot of a helper.
    std::vector<std::atomic<std::uint64_t>> claims_;
    Offer offer_;
    std::atomic<std::uint64_t> op_{0};  // odd while an offer is written
    // The piece that the next helper claims, from the last one down, because the op's own threads
    // begin with the first; -1: none.
    std::atomic<int> next_{-1};
    std::atomic<CoreSet> used_cores_{0};   // cores of the threads of the current op
    OfOwnProcess<HelperThreads> threads_;  // ends first: its threads use all of the above
};

}  // namespace entropykv
