// A ggml device that computes nothing, and counts what makes the host wait, so that the time of a
// step is the host's alone. It can pretend to be busy for a time with each node, which shows how
// long a real device would have nothing to do. Its memory is never written, so results have no
// meaning. The structures are those of ggml's header ggml-backend-impl.h, which may change between
// releases of llama.cpp: see plain_memory_device.py for the version.
#include <ggml-backend.h>
#include <ggml.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>

extern "C" {
struct ggml_backend_buffer_type {
    const char* (*get_name)(ggml_backend_buffer_type_t);
    ggml_backend_buffer_t (*alloc_buffer)(ggml_backend_buffer_type_t, size_t);
    size_t (*get_alignment)(ggml_backend_buffer_type_t);
    size_t (*get_max_size)(ggml_backend_buffer_type_t);
    size_t (*get_alloc_size)(ggml_backend_buffer_type_t, const ggml_tensor*);
    bool (*is_host)(ggml_backend_buffer_type_t);
    ggml_backend_dev_t device;
    void* context;
};

struct BufferFunctions {
    void (*free_buffer)(ggml_backend_buffer_t);
    void* (*get_base)(ggml_backend_buffer_t);
    ggml_status (*init_tensor)(ggml_backend_buffer_t, ggml_tensor*);
    void (*memset_tensor)(ggml_backend_buffer_t, ggml_tensor*, uint8_t, size_t, size_t);
    void (*set_tensor)(ggml_backend_buffer_t, ggml_tensor*, const void*, size_t, size_t);
    void (*get_tensor)(ggml_backend_buffer_t, const ggml_tensor*, void*, size_t, size_t);
    void* copies_of_two_dimensions[2];
    bool (*cpy_tensor)(ggml_backend_buffer_t, const ggml_tensor*, ggml_tensor*);
    void (*clear)(ggml_backend_buffer_t, uint8_t);
    void (*reset)(ggml_backend_buffer_t);
};
ggml_backend_buffer_t ggml_backend_buffer_init(ggml_backend_buffer_type_t, BufferFunctions, void*,
                                               size_t);

struct ggml_backend {
    ggml_guid_t guid;
    const char* (*get_name)(ggml_backend_t);
    void (*free)(ggml_backend_t);
    void (*set_tensor_async)(ggml_backend_t, ggml_tensor*, const void*, size_t, size_t);
    void (*get_tensor_async)(ggml_backend_t, const ggml_tensor*, void*, size_t, size_t);
    void* copies[3];
    void (*synchronize)(ggml_backend_t);
    void* plans[4];
    ggml_status (*graph_compute)(ggml_backend_t, ggml_cgraph*);
    void* events_and_optimizing[3];
    ggml_backend_dev_t device;
    void* context;
};

struct ggml_backend_device {
    const char* (*get_name)(ggml_backend_dev_t);
    const char* (*get_description)(ggml_backend_dev_t);
    void (*get_memory)(ggml_backend_dev_t, size_t*, size_t*);
    enum ggml_backend_dev_type (*get_type)(ggml_backend_dev_t);
    void (*get_props)(ggml_backend_dev_t, ggml_backend_dev_props*);
    ggml_backend_t (*init_backend)(ggml_backend_dev_t, const char*);
    ggml_backend_buffer_type_t (*get_buffer_type)(ggml_backend_dev_t);
    void* host_buffers[2];
    bool (*supports_op)(ggml_backend_dev_t, const ggml_tensor*);
    bool (*supports_buft)(ggml_backend_dev_t, ggml_backend_buffer_type_t);
    void* offload_and_events[4];
    ggml_backend_reg_t reg;
    void* context;
};

struct ggml_backend_reg {
    int api_version;
    const char* (*get_name)(ggml_backend_reg_t);
    size_t (*get_device_count)(ggml_backend_reg_t);
    ggml_backend_dev_t (*get_device)(ggml_backend_reg_t, size_t);
    void* (*get_proc_address)(ggml_backend_reg_t, const char*);
    void* context;
};
}

namespace {

struct Counts {
    std::atomic<std::int64_t> waits{0};   // calls of synchronize() that follow new work
    std::atomic<std::int64_t> copies{0};  // copies from and to the host
    std::atomic<std::int64_t> graphs{0};
    std::atomic<std::int64_t> nodes{0};   // nodes that compute something
    std::atomic<std::int64_t> unused{0};  // nanoseconds between the end of a graph and the next one
};

Counts counts;
std::int64_t cost = 0;     // nanoseconds that a wait or a copy takes
std::int64_t of_node = 0;  // nanoseconds that the device takes for a node
std::atomic<std::int64_t> busy_until{0};

std::int64_t now() {
    return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

void wait_until(std::int64_t end) {
    while (now() < end) {
    }
}

void spend() { wait_until(now() + cost); }

// Keeps the device busy with a graph, after the graphs before it.
void be_busy(std::int64_t nodes) {
    const std::int64_t begin = now();
    const std::int64_t before =
        busy_until.exchange(std::max(busy_until.load(), begin) + nodes * of_node);
    if (before != 0 && begin > before) counts.unused += begin - before;
}

bool computes(const ggml_tensor* node) {
    return node->op != GGML_OP_NONE && node->op != GGML_OP_VIEW && node->op != GGML_OP_RESHAPE &&
           node->op != GGML_OP_PERMUTE && node->op != GGML_OP_TRANSPOSE;
}

// Fills memory of the host with numbers from 0 to 1, as if the device had copied them. This happens
// once per address, because a device would write them without the host's time.
void fill(void* to, std::size_t bytes) {
    static std::mutex mutex;
    static std::map<void*, std::size_t> filled;
    const std::lock_guard<std::mutex> lock(mutex);
    std::size_t& known = filled[to];
    std::uint32_t random = 1;
    for (std::size_t i = known / sizeof(float); i < bytes / sizeof(float); ++i) {
        random = random * 1664525 + 1013904223;
        static_cast<float*>(to)[i] = static_cast<float>(random >> 8) / 16777216.0f;
    }
    known = std::max(known, bytes);
}

void count_copy() {
    ++counts.copies;
    spend();
}

ggml_backend_buffer_type memory{};
ggml_backend_device device{};
ggml_backend_reg registry{};
std::uint8_t guid[16] = "idle device....";

// Copies of up to this many bytes are really made, so that what is written can be read. Larger ones
// are not, because a device would make them without the host's time.
constexpr std::size_t kKept = 1 << 16;

// The system provides pages of this memory only when they are used.
struct Range {
    void* base;
    std::size_t size;
};

ggml_backend_buffer_t allocate(ggml_backend_buffer_type_t type, std::size_t size) {
    const std::size_t whole = size > 0 ? size : 1;
    void* base = mmap(nullptr, whole, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) return nullptr;
    BufferFunctions functions{};
    functions.free_buffer = [](ggml_backend_buffer_t buffer) {
        auto* range = static_cast<Range*>(
            *reinterpret_cast<void**>(reinterpret_cast<char*>(buffer) + sizeof(BufferFunctions) +
                                      sizeof(ggml_backend_buffer_type_t)));
        munmap(range->base, range->size);
        delete range;
    };
    functions.get_base = [](ggml_backend_buffer_t buffer) {
        return static_cast<Range*>(*reinterpret_cast<void**>(reinterpret_cast<char*>(buffer) +
                                                             sizeof(BufferFunctions) +
                                                             sizeof(ggml_backend_buffer_type_t)))
            ->base;
    };
    functions.memset_tensor = [](ggml_backend_buffer_t, ggml_tensor*, std::uint8_t, std::size_t,
                                 std::size_t) {};
    functions.set_tensor = [](ggml_backend_buffer_t, ggml_tensor* tensor, const void* from,
                              std::size_t offset, std::size_t bytes) {
        count_copy();
        if (bytes <= kKept) std::memcpy(static_cast<char*>(tensor->data) + offset, from, bytes);
    };
    functions.get_tensor = [](ggml_backend_buffer_t, const ggml_tensor* tensor, void* to,
                              std::size_t offset, std::size_t bytes) {
        count_copy();
        if (bytes <= kKept)
            std::memcpy(to, static_cast<const char*>(tensor->data) + offset, bytes);
        else
            std::memset(to, 0, bytes);
    };
    functions.clear = [](ggml_backend_buffer_t, std::uint8_t) {};
    return ggml_backend_buffer_init(type, functions, new Range{base, whole}, size);
}

ggml_backend_t make_backend(ggml_backend_dev_t, const char*) {
    auto* backend = new ggml_backend{};
    backend->guid = &guid;
    backend->device = &device;
    backend->context = new std::atomic<bool>(false);  // whether work was begun since the last wait
    backend->get_name = [](ggml_backend_t) { return "IDLE"; };
    backend->free = [](ggml_backend_t self) {
        delete static_cast<std::atomic<bool>*>(self->context);
        delete self;
    };
    backend->set_tensor_async = [](ggml_backend_t, ggml_tensor*, const void*, std::size_t,
                                   std::size_t) { count_copy(); };
    backend->get_tensor_async = [](ggml_backend_t self, const ggml_tensor*, void* to, std::size_t,
                                   std::size_t bytes) {
        count_copy();
        fill(to, bytes);
        *static_cast<std::atomic<bool>*>(self->context) = true;
    };
    backend->synchronize = [](ggml_backend_t self) {
        if (!static_cast<std::atomic<bool>*>(self->context)->exchange(false)) return;
        ++counts.waits;
        wait_until(busy_until);
        spend();
    };
    backend->graph_compute = [](ggml_backend_t self, ggml_cgraph* graph) {
        ++counts.graphs;
        std::int64_t nodes = 0;
        for (int i = 0; i < ggml_graph_n_nodes(graph); ++i)
            nodes += computes(ggml_graph_node(graph, i)) ? 1 : 0;
        counts.nodes += nodes;
        be_busy(nodes);
        *static_cast<std::atomic<bool>*>(self->context) = true;
        return GGML_STATUS_SUCCESS;
    };
    return backend;
}

}  // namespace

extern "C" {

// Registers the device, in libggml's list of devices.
void use_idle_device(void (*add)(ggml_backend_reg_t)) {
    memory.get_name = [](ggml_backend_buffer_type_t) { return "IDLE"; };
    memory.alloc_buffer = allocate;
    memory.get_alignment = [](ggml_backend_buffer_type_t) { return std::size_t{128}; };
    memory.device = &device;
    device.get_name = [](ggml_backend_dev_t) { return "IDLE0"; };
    device.get_description = device.get_name;
    device.get_memory = [](ggml_backend_dev_t, std::size_t* free, std::size_t* total) {
        *free = *total = std::size_t{1} << 40;
    };
    device.get_type = [](ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; };
    device.get_props = [](ggml_backend_dev_t, ggml_backend_dev_props* properties) {
        *properties = {};
        properties->name = properties->description = "IDLE0";
        properties->memory_free = properties->memory_total = std::size_t{1} << 40;
        properties->type = GGML_BACKEND_DEVICE_TYPE_GPU;
        properties->caps.async = true;
    };
    device.init_backend = make_backend;
    device.get_buffer_type = [](ggml_backend_dev_t) { return &memory; };
    device.supports_op = [](ggml_backend_dev_t, const ggml_tensor*) { return true; };
    device.supports_buft = [](ggml_backend_dev_t, ggml_backend_buffer_type_t type) {
        return type == &memory;
    };
    device.reg = &registry;
    registry.api_version = 2;
    registry.get_name = [](ggml_backend_reg_t) { return "IDLE"; };
    registry.get_device_count = [](ggml_backend_reg_t) { return std::size_t{1}; };
    registry.get_device = [](ggml_backend_reg_t, std::size_t) { return &device; };
    add(&registry);
}

void set_cost(std::int64_t nanoseconds, std::int64_t nanoseconds_of_node) {
    cost = nanoseconds;
    of_node = nanoseconds_of_node;
}

// Writes the counts: waits, copies, graphs, nodes, and unused nanoseconds.
void read_counts(std::int64_t* to) {
    to[0] = counts.waits;
    to[1] = counts.copies;
    to[2] = counts.graphs;
    to[3] = counts.nodes;
    to[4] = counts.unused;
}
}
