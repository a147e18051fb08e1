// Defines a device of ggml as the device store uses it: it computes graphs of ours, and has memory
// in which tensors of several graphs lie.
#pragma once

#include <ggml-alloc.h>
#include <ggml-backend.h>
#include <ggml.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "platform/background_thread.hpp"
#include "platform/own_process.hpp"
#include "platform/worker_threads.hpp"

namespace entropykv {

struct FreeBuffer {
    void operator()(ggml_backend_buffer_t buffer) const { ggml_backend_buffer_free(buffer); }
};
struct FreeContext {
    void operator()(ggml_context* context) const { ggml_free(context); }
};
struct FreeBackend {
    void operator()(ggml_backend_t backend) const { ggml_backend_free(backend); }
};
struct FreeAllocator {
    void operator()(ggml_gallocr_t allocator) const { ggml_gallocr_free(allocator); }
};

// Counts the graphs that devices compute, and the copies between them and the host.
struct DeviceTraffic {
    std::size_t computed = 0;   // graphs
    std::size_t uploads = 0;    // copies from the host
    std::size_t downloads = 0;  // copies to the host
};

// Makes a tensor that shares the memory of another one, from byte `offset` on, but has no sources:
// those belong to another graph, and ours would compute them again.
ggml_tensor* leaf_of(ggml_context* context, const ggml_tensor* tensor, std::size_t offset = 0);

// Tells whether a device that computes in `memory` can use a tensor that has a place: it can if the
// tensor lies in `memory`, or if both are main memory.
bool is_usable_in(ggml_backend_buffer_type_t memory, const ggml_tensor* tensor);

class DevicePlaces;
class DeviceRelay;
class HostMemory;

// Computes graphs one after another, in working memory that they share.
class Device {
public:
    // memory: a buffer type of the device. Throws std::runtime_error if the device cannot be used.
    Device(ggml_backend_buffer_type_t memory, int n_threads);
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;
    ~Device();

    ggml_backend_buffer_type_t memory() const { return memory_; }
    // Returns the relay that copies tensors which this device cannot use.
    DeviceRelay& relay() { return *relay_; }
    std::string name() const;
    // Returns the least multiple of the memory's alignment that is at least `bytes`.
    std::size_t aligned(std::size_t bytes) const;
    bool is_aligned(std::size_t bytes) const { return aligned(bytes) == bytes; }
    // Makes the context of the next graph, whose tensors exist as long as it does. Waits for the
    // graphs before it.
    std::unique_ptr<ggml_context, FreeContext> graph_context();
    // Makes the context of a graph that is built while the device computes the one before it. The
    // graph before must have ended when this one gets its places.
    std::unique_ptr<ggml_context, FreeContext> next_graph_context();
    static ggml_cgraph* new_graph(ggml_context* context);
    // Tells whether the context of a graph has room for n more tensors.
    static bool has_room_for(ggml_context* context, int n);
    bool supports(const ggml_tensor* operation) const {
        return ggml_backend_supports_op(backend_.get(), operation);
    }
    // Returns the name of an operation that the device cannot compute, or an empty string.
    std::string unsupported_in(ggml_cgraph* graph) const;
    // Gives tensors of a graph their places in the working memory. Throws std::bad_alloc.
    void place(ggml_cgraph* graph);
    // Computes a graph whose tensors have places. Throws std::runtime_error if the device fails.
    void compute(ggml_cgraph* graph);
    // Begins to compute a graph after those that were begun before, and does not wait for its end.
    // Throws as compute() does.
    void launch(ggml_cgraph* graph);
    // Begins to copy a range of a tensor to byte `at` of the host's memory, after what was begun
    // before; it is there after wait().
    void begin_read(HostMemory& to, std::size_t at, const ggml_tensor* tensor, std::size_t offset,
                    std::size_t bytes);
    // Waits for everything that was begun.
    void wait();
    // Returns memory of the host to which rows are copied when they are saved; it is kept for the
    // next time.
    HostMemory& saved_rows() { return *saved_rows_; }
    // Returns the bytes of working memory, on the device and on the host.
    std::size_t scratch_bytes() const;

    DeviceTraffic traffic;

private:
    ggml_backend_buffer_type_t memory_;
    std::unique_ptr<ggml_backend, FreeBackend> backend_;
    std::unique_ptr<ggml_gallocr, FreeAllocator> allocator_;
    std::unique_ptr<ggml_context, FreeContext> context_in(std::vector<std::uint8_t>& memory);

    std::vector<std::uint8_t> graph_memory_;
    std::vector<std::uint8_t> next_graph_memory_;  // takes turns with graph_memory_; may be empty
    std::unique_ptr<DeviceRelay> relay_;
    std::unique_ptr<HostMemory> saved_rows_;
    bool in_flight_ = false;  // whether something was begun that nobody has waited for
};

// Holds memory of the host that a device copies to while the host does something else, if the
// device has such memory.
class HostMemory {
public:
    explicit HostMemory(const Device& device) : device_(device) {}

    std::uint8_t* data() const { return data_; }
    std::size_t size() const { return size_; }
    std::size_t capacity() const { return capacity_; }
    // The content is lost if the memory grows; nothing may be copied to it then. Throws
    // std::bad_alloc.
    void resize(std::size_t bytes);

private:
    const Device& device_;
    std::unique_ptr<ggml_backend_buffer, FreeBuffer> buffer_;
    std::uint8_t* data_ = nullptr;
    std::size_t size_ = 0;
    std::size_t capacity_ = 0;
};

// Holds memory of a device in which tensors of several graphs have their places.
class DeviceMemory {
public:
    // Throws std::bad_alloc if the device has no memory.
    DeviceMemory(Device& device, std::size_t bytes);

    // Makes a tensor of a graph at an offset, a multiple of the memory's alignment.
    ggml_tensor* tensor(ggml_context* context, ggml_type type, std::size_t offset, std::int64_t a,
                        std::int64_t b = 1, std::int64_t c = 1, std::int64_t d = 1) const;
    void write(std::size_t offset, const void* values, std::size_t bytes);
    // Writes bytes to the beginning of this memory, unless the last tell() wrote the same bytes.
    void tell(const std::vector<std::uint8_t>& bytes);
    // Begins to copy a range to the same place of the host's memory: see Device::begin_read().
    void begin_read(HostMemory& to, std::size_t offset, std::size_t bytes);
    // Counts the bytes of this memory, and of the host's copy that tell() compares.
    std::size_t bytes() const {
        return ggml_backend_buffer_get_size(buffer_.get()) + told_.capacity();
    }

private:
    std::unique_ptr<ggml_context, FreeContext> context_;
    std::unique_ptr<ggml_backend_buffer, FreeBuffer> buffer_;
    ggml_tensor* all_;
    Device& device_;
    std::vector<std::uint8_t> told_;
};

// Holds the devices that the stores of one llama_context share, and the threads on which the host
// decides.
class Devices {
public:
    // n_threads: how many threads of the CPU decide, and compute layers whose device cannot.
    // n_places: how many sequences there may be at most.
    Devices(int n_threads, int n_places)
        : n_threads_(n_threads), n_places_(n_places), workers_(n_threads) {}

    int n_places() const { return n_places_; }
    // Returns the places of the last set_places(); null if no sequence uses them any more.
    std::shared_ptr<DevicePlaces> places() const { return places_.lock(); }
    void set_places(const std::shared_ptr<DevicePlaces>& places) { places_ = places; }
    // Returns a number that no sequence got before, so that graphs which were made for the former
    // owner of a place on the device are not reused by the next one.
    std::size_t note_taken() { return ++n_taken_; }

    // Returns the device with this buffer type, which is opened once. Throws as Device does.
    Device& of(ggml_backend_buffer_type_t memory);
    // From now on, new stores let the CPU serve this layer, because its own device cannot; `why`
    // says what the device cannot compute.
    void serve_on_host(int layer, const std::string& why) { on_host_[layer] = why; }
    // Returns why the CPU serves layers that are on other devices, by the numbers of the layers.
    const std::map<int, std::string>& on_host() const { return on_host_; }
    // Returns the threads on which the host decides; no device computes on them. Throws
    // std::runtime_error in a process that was forked, as background() does.
    WorkerThreads& workers() { return workers_.get(); }
    // Returns a thread that decides while the devices compute; it may ask workers().
    BackgroundThread& background() { return background_.get(); }
    // Returns the sum over all devices.
    DeviceTraffic traffic() const;
    std::size_t scratch_bytes() const;
    // Closes the devices; no store may use them afterwards.
    void close() noexcept { devices_.clear(); }

private:
    int n_threads_;
    int n_places_;
    std::weak_ptr<DevicePlaces> places_;
    std::size_t n_taken_ = 0;
    OfOwnProcess<WorkerThreads> workers_;
    OfOwnProcess<BackgroundThread> background_;
    std::vector<std::unique_ptr<Device>> devices_;
    std::map<int, std::string> on_host_;
};

}  // namespace entropykv
