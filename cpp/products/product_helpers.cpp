#include "products/product_helpers.hpp"

#include <cstring>

namespace entropykv {
namespace {

constexpr int kOwnerBits = 16;
constexpr std::uint64_t kNobody = 0, kThreadOfOp = 1, kFirstSlot = 2;
constexpr int kPieceBits = 24;

std::uint64_t claim_of(std::uint64_t op, std::uint64_t owner) { return op << kOwnerBits | owner; }
std::uint64_t ready_of(std::uint64_t op, int piece) {
    return op << kPieceBits | (static_cast<std::uint64_t>(piece) + 1);
}
std::uint64_t op_of(std::uint64_t ready) { return ready >> kPieceBits; }
int piece_of(std::uint64_t ready) {
    return static_cast<int>(ready & ((std::uint64_t{1} << kPieceBits) - 1)) - 1;
}

}  // namespace

ProductHelpers::ProductHelpers(const ProductTable& kernels)
    : kernels_(kernels), threads_([this](int helper) { return help(helper); }) {}

std::size_t ProductHelpers::bytes() const {
    std::size_t bytes = claims_.size() * sizeof claims_[0];
    for (const Helper& helper : helpers_) {
        bytes += helper.tile.size();
        for (const Slot& slot : helper.slots) bytes += slot.products.size();
    }
    return bytes;
}

void ProductHelpers::wake(int n, int most_pieces) {
    if (static_cast<int>(helpers_.size()) < n || claims_.size() < index(most_pieces)) rest();
    while (static_cast<int>(helpers_.size()) < n) {
        Helper& helper = helpers_.emplace_back();
        helper.tile = AlignedBytes(kernels_.tile_bytes);
        for (Slot& slot : helper.slots)
            slot.products = AlignedBytes(index(kernels_.tile_rows * kTileTokens) * sizeof(float));
    }
    if (claims_.size() < index(most_pieces))
        claims_ = std::vector<std::atomic<std::uint64_t>>(index(most_pieces));
    threads_->wake(n);
    awake_ = n;
}

void ProductHelpers::rest() noexcept {
    threads_->rest();
    awake_ = 0;
}

bool ProductHelpers::offer(const ProductPieces& pieces) noexcept {
    const int n = pieces.size();
    if (awake_ == 0 || index(n) > claims_.size() || n >= 1 << kPieceBits) return false;
    const std::uint64_t op = op_.load(std::memory_order_relaxed) + 2;
    op_.store(op - 1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    const ProductTask& task = pieces.task;
    constexpr auto relaxed = std::memory_order_relaxed;
    offer_.type.store(task.type, relaxed);
    offer_.weights.store(task.weights.data, relaxed);
    offer_.weights_stride.store(task.weights.stride, relaxed);
    offer_.n_rows.store(task.weights.n_rows, relaxed);
    offer_.n_values.store(task.weights.n_values, relaxed);
    offer_.n_tokens.store(task.n_tokens, relaxed);
    offer_.rounded.store(pieces.rounded, relaxed);
    for (int i = 0; i < n; ++i) claims_[index(i)].store(claim_of(op, kNobody), relaxed);
    next_.store(n - 1, relaxed);
    used_cores_.store(0, relaxed);
    op_.store(op, std::memory_order_release);
    return true;
}

void ProductHelpers::note_core() noexcept {
    used_cores_.fetch_or(own_core(), std::memory_order_relaxed);
}

// The system often wakes a helper on the core of the thread that woke it.
void ProductHelpers::leave_used_core() noexcept {
    thread_local const AllowedCores allowed;
    const CoreSet used = used_cores_.load(std::memory_order_relaxed);
    if ((own_core() & used) != 0) allowed.avoid(used);
}

bool ProductHelpers::read_offer(std::uint64_t op, ProductTask& task,
                                const std::byte*& rounded) const noexcept {
    constexpr auto relaxed = std::memory_order_relaxed;
    task.type = offer_.type.load(relaxed);
    task.weights = {offer_.weights.load(relaxed), offer_.weights_stride.load(relaxed),
                    offer_.n_rows.load(relaxed), offer_.n_values.load(relaxed)};
    task.n_tokens = offer_.n_tokens.load(relaxed);
    rounded = offer_.rounded.load(relaxed);
    std::atomic_thread_fence(std::memory_order_acquire);
    return op_.load(relaxed) == op;
}

// If this op is over before the helper is done, the tokens that it reads may be those of another op
// by now. Then its products are wrong, and no thread copies them.
bool ProductHelpers::help(int number) noexcept {
    leave_used_core();
    const std::uint64_t op = op_.load(std::memory_order_acquire);
    if (op % 2 == 1 || next_.load(std::memory_order_relaxed) < 0) return false;
    ProductTask task{};
    const std::byte* rounded = nullptr;
    if (!read_offer(op, task, rounded)) return false;
    Helper& helper = helpers_[index(number)];
    const int free = free_slot(helper, op);
    if (free < 0) return false;
    const std::uint64_t owner = kFirstSlot + static_cast<std::uint64_t>(number * kSlots + free);
    int piece = -1;
    do {
        piece = next_.fetch_sub(1, std::memory_order_relaxed);
        if (piece < 0) return false;
    } while (!replace_owner(piece, claim_of(op, kNobody), claim_of(op, owner)));
    const ProductPiece work = ProductPieces(kernels_, task, rounded)[piece];
    Slot& slot = helper.slots[free];
    kernels_.of(task.type).many(work.rows, work.tokens, helper.tile.data(),
                                reinterpret_cast<float*>(slot.products.data()),
                                index(kernels_.tile_rows));
    slot.ready.store(ready_of(op, piece), std::memory_order_release);
    // If a thread of the op took the piece back before the slot was ready, it does not free the
    // slot, so the helper does.
    if (claims_[index(piece)].load(std::memory_order_relaxed) != claim_of(op, owner)) {
        std::uint64_t expected = ready_of(op, piece);
        slot.ready.compare_exchange_strong(expected, 0, std::memory_order_relaxed);
    }
    return true;
}

// A slot of an earlier op is free, because all threads of that op have left it.
int ProductHelpers::free_slot(const Helper& helper, std::uint64_t op) const noexcept {
    for (int i = 0; i < kSlots; ++i) {
        const std::uint64_t ready = helper.slots[i].ready.load(std::memory_order_acquire);
        if (ready == 0 || op_of(ready) != op) return i;
    }
    return -1;
}

bool ProductHelpers::replace_owner(int piece, std::uint64_t owner, std::uint64_t by) noexcept {
    return claims_[index(piece)].compare_exchange_strong(owner, by, std::memory_order_relaxed);
}

bool ProductHelpers::claim(int piece) noexcept {
    const std::uint64_t op = op_.load(std::memory_order_relaxed);
    return replace_owner(piece, claim_of(op, kNobody), claim_of(op, kThreadOfOp));
}

void ProductHelpers::collect(const ProductPieces& pieces) noexcept {
    const std::uint64_t op = op_.load(std::memory_order_relaxed);
    for (int i = 0; i < awake_ * kSlots; ++i) {
        Slot& from = slot(i);
        const std::uint64_t ready = from.ready.load(std::memory_order_acquire);
        if (ready == 0 || op_of(ready) != op) continue;
        const std::uint64_t owner = kFirstSlot + static_cast<std::uint64_t>(i);
        const int piece = piece_of(ready);
        if (replace_owner(piece, claim_of(op, owner), claim_of(op, kThreadOfOp)))
            copy(pieces, piece, from);
    }
}

bool ProductHelpers::take_back(const ProductPieces& pieces, int piece) noexcept {
    const std::uint64_t op = op_.load(std::memory_order_relaxed);
    const std::uint64_t claimed = claims_[index(piece)].load(std::memory_order_relaxed);
    const std::uint64_t owner = claimed & ((std::uint64_t{1} << kOwnerBits) - 1);
    if (owner < kFirstSlot) return false;
    if (!replace_owner(piece, claimed, claim_of(op, kThreadOfOp))) return false;
    Slot& from = slot(static_cast<int>(owner - kFirstSlot));
    if (from.ready.load(std::memory_order_acquire) != ready_of(op, piece)) return true;
    copy(pieces, piece, from);
    return false;
}

void ProductHelpers::copy(const ProductPieces& pieces, int number, Slot& from) noexcept {
    const ProductPiece piece = pieces[number];
    const auto* products = reinterpret_cast<const float*>(from.products.data());
    const std::size_t bytes = index(piece.rows.n_rows) * sizeof(float);
    for (int t = 0; t < piece.tokens.n_tokens; ++t)
        std::memcpy(piece.out + index(t) * pieces.task.out_stride,
                    products + index(t * kernels_.tile_rows), bytes);
    from.ready.store(0, std::memory_order_release);
}

}  // namespace entropykv
