#include "llama/device.hpp"

#include <algorithm>
#include <new>
#include <stdexcept>
#include <utility>

#include "llama/device_relay.hpp"

namespace entropykv {
namespace {

constexpr int kMostNodes = 8192;

ggml_backend_dev_t device_of(ggml_backend_buffer_type_t memory) {
    // ggml does not say to which device the main memory belongs.
    ggml_backend_dev_t device = ggml_backend_buft_get_device(memory);
    return device != nullptr ? device : ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
}

}  // namespace

ggml_tensor* leaf_of(ggml_context* context, const ggml_tensor* tensor, std::size_t offset) {
    ggml_tensor* leaf = ggml_new_tensor(context, tensor->type, GGML_MAX_DIMS, tensor->ne);
    std::copy(tensor->nb, tensor->nb + GGML_MAX_DIMS, leaf->nb);
    // A tensor that only says what a graph looks like has no memory.
    if (tensor->data != nullptr) leaf->data = static_cast<char*>(tensor->data) + offset;
    leaf->buffer = tensor->buffer;
    leaf->extra = tensor->extra;
    return leaf;
}

bool is_usable_in(ggml_backend_buffer_type_t memory, const ggml_tensor* tensor) {
    ggml_backend_buffer_t buffer =
        tensor->view_src != nullptr ? tensor->view_src->buffer : tensor->buffer;
    return ggml_backend_buffer_get_type(buffer) == memory ||
           (ggml_backend_buffer_is_host(buffer) && ggml_backend_buft_is_host(memory));
}

Device::Device(ggml_backend_buffer_type_t memory, int n_threads)
    : memory_(memory),
      backend_(ggml_backend_dev_init(device_of(memory), nullptr)),
      allocator_(ggml_gallocr_new(memory)),
      graph_memory_(ggml_tensor_overhead() * kMostNodes +
                    ggml_graph_overhead_custom(kMostNodes, false)),
      relay_(std::make_unique<DeviceRelay>(*this)),
      saved_rows_(std::make_unique<HostMemory>(*this)) {
    if (backend_ == nullptr) throw std::runtime_error("a device cannot be used a second time");
    if (allocator_ == nullptr) throw std::bad_alloc();
    ggml_backend_reg_t backend_of = ggml_backend_dev_backend_reg(device_of(memory));
    const auto set_threads = reinterpret_cast<ggml_backend_set_n_threads_t>(
        ggml_backend_reg_get_proc_address(backend_of, "ggml_backend_set_n_threads"));
    if (set_threads != nullptr) set_threads(backend_.get(), n_threads);
}

Device::~Device() = default;

std::string Device::name() const { return ggml_backend_dev_name(device_of(memory_)); }

std::size_t Device::aligned(std::size_t bytes) const {
    const std::size_t to = ggml_backend_buft_get_alignment(memory_);
    return (bytes + to - 1) / to * to;
}

std::unique_ptr<ggml_context, FreeContext> Device::graph_context() {
    wait();  // all graphs use the same working memory
    return context_in(graph_memory_);
}

std::unique_ptr<ggml_context, FreeContext> Device::next_graph_context() {
    next_graph_memory_.resize(graph_memory_.size());
    std::swap(graph_memory_, next_graph_memory_);
    return context_in(graph_memory_);
}

std::unique_ptr<ggml_context, FreeContext> Device::context_in(std::vector<std::uint8_t>& memory) {
    return std::unique_ptr<ggml_context, FreeContext>(
        ggml_init({memory.size(), memory.data(), true}));
}

ggml_cgraph* Device::new_graph(ggml_context* context) {
    return ggml_new_graph_custom(context, kMostNodes, false);
}

bool Device::has_room_for(ggml_context* context, int n) {
    return ggml_used_mem(context) + static_cast<std::size_t>(n) * ggml_tensor_overhead() <=
           ggml_get_mem_size(context);
}

std::string Device::unsupported_in(ggml_cgraph* graph) const {
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        const ggml_tensor* op = ggml_graph_node(graph, i);
        if (!ggml_backend_supports_op(backend_.get(), op)) return ggml_op_name(op->op);
    }
    return {};
}

void Device::place(ggml_cgraph* graph) {
    if (!ggml_gallocr_alloc_graph(allocator_.get(), graph)) throw std::bad_alloc();
}

void Device::compute(ggml_cgraph* graph) {
    launch(graph);
    wait();
}

void Device::launch(ggml_cgraph* graph) {
    ++traffic.computed;
    in_flight_ = true;
    if (ggml_backend_graph_compute_async(backend_.get(), graph) != GGML_STATUS_SUCCESS)
        throw std::runtime_error("a device could not compute the attention of a layer");
}

void Device::begin_read(HostMemory& to, std::size_t at, const ggml_tensor* tensor,
                        std::size_t offset, std::size_t bytes) {
    if (bytes == 0) return;
    ++traffic.downloads;
    in_flight_ = true;
    ggml_backend_tensor_get_async(backend_.get(), tensor, to.data() + at, offset, bytes);
}

void Device::wait() {
    if (!in_flight_) return;
    ggml_backend_synchronize(backend_.get());
    in_flight_ = false;
}

std::size_t Device::scratch_bytes() const {
    return ggml_gallocr_get_buffer_size(allocator_.get(), 0) + graph_memory_.size() +
           next_graph_memory_.size() + relay_->bytes() + saved_rows_->capacity();
}

void HostMemory::resize(std::size_t bytes) {
    size_ = bytes;
    if (bytes <= capacity_) return;
    ggml_backend_buffer_type_t memory =
        ggml_backend_dev_host_buffer_type(device_of(device_.memory()));
    if (memory == nullptr) memory = ggml_backend_cpu_buffer_type();
    buffer_.reset(ggml_backend_buft_alloc_buffer(memory, bytes));
    if (buffer_ == nullptr) throw std::bad_alloc();
    data_ = static_cast<std::uint8_t*>(ggml_backend_buffer_get_base(buffer_.get()));
    capacity_ = bytes;
}

DeviceMemory::DeviceMemory(Device& device, std::size_t bytes)
    : context_(ggml_init({ggml_tensor_overhead(), nullptr, true})), device_(device) {
    if (context_ == nullptr) throw std::bad_alloc();
    all_ = ggml_new_tensor_1d(context_.get(), GGML_TYPE_I8, static_cast<std::int64_t>(bytes));
    buffer_.reset(ggml_backend_alloc_ctx_tensors_from_buft(context_.get(), device.memory()));
    if (buffer_ == nullptr) throw std::bad_alloc();
}

ggml_tensor* DeviceMemory::tensor(ggml_context* context, ggml_type type, std::size_t offset,
                                  std::int64_t a, std::int64_t b, std::int64_t c,
                                  std::int64_t d) const {
    ggml_tensor* tensor = ggml_new_tensor_4d(context, type, a, b, c, d);
    if (ggml_backend_tensor_alloc(buffer_.get(), tensor, static_cast<char*>(all_->data) + offset) !=
        GGML_STATUS_SUCCESS)
        throw std::bad_alloc();
    return tensor;
}

void DeviceMemory::write(std::size_t offset, const void* values, std::size_t bytes) {
    ++device_.traffic.uploads;
    ggml_backend_tensor_set(all_, values, offset, bytes);
}

void DeviceMemory::tell(const std::vector<std::uint8_t>& bytes) {
    if (bytes == told_) return;
    told_.clear();  // unknown until the write has succeeded
    write(0, bytes.data(), bytes.size());
    told_ = bytes;
}

void DeviceMemory::begin_read(HostMemory& to, std::size_t offset, std::size_t bytes) {
    device_.begin_read(to, offset, all_, offset, bytes);
}

Device& Devices::of(ggml_backend_buffer_type_t memory) {
    for (const auto& device : devices_)
        if (device->memory() == memory) return *device;
    return *devices_.emplace_back(std::make_unique<Device>(memory, n_threads_));
}

DeviceTraffic Devices::traffic() const {
    DeviceTraffic sum;
    for (const auto& device : devices_) {
        sum.computed += device->traffic.computed;
        sum.uploads += device->traffic.uploads;
        sum.downloads += device->traffic.downloads;
    }
    return sum;
}

std::size_t Devices::scratch_bytes() const {
    std::size_t bytes = 0;
    for (const auto& device : devices_) bytes += device->scratch_bytes();
    return bytes;
}

}  // namespace entropykv
