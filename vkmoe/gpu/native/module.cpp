// The Python module vkmoe.gpu._native: names, argument types and exceptions, no logic.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "device.hpp"
#include "facts.hpp"

namespace py = pybind11;
using namespace pybind11::literals;

namespace vkmoe {

namespace {

PyObject* vulkan_error = nullptr;
PyObject* device_lost = nullptr;

/// Something Python can close while recordings or devices still hold the object behind it.
template <class Object>
struct Handle {
    std::shared_ptr<Object> object;

    Object& operator*() const {
        if (!object) throw std::runtime_error("already closed");
        return *object;
    }
    Object* operator->() const { return &**this; }
};
using BufferHandle = Handle<Buffer>;
using InstanceHandle = Handle<Instance>;

void add_exceptions(py::module_& module) {
    vulkan_error =
        PyErr_NewException("vkmoe.gpu._native.VulkanError", PyExc_RuntimeError, nullptr);
    device_lost = PyErr_NewException("vkmoe.gpu._native.DeviceLost", vulkan_error, nullptr);
    module.add_object("VulkanError", vulkan_error);
    module.add_object("DeviceLost", device_lost);
    py::register_exception_translator([](std::exception_ptr pointer) {
        try {
            if (pointer) std::rethrow_exception(pointer);
        } catch (const VulkanError& error) {
            const py::handle type =
                error.result == VK_ERROR_DEVICE_LOST ? device_lost : vulkan_error;
            const py::object raised = type(error.what());
            raised.attr("result") = result_name(error.result);
            raised.attr("call") = error.call;
            PyErr_SetObject(type.ptr(), raised.ptr());
        }
    });
}

void add_instance(py::module_& module) {
    py::class_<InstanceHandle>(module, "Instance")
        .def(py::init([](bool validation) {
                 return InstanceHandle{std::make_shared<Instance>(validation)};
             }),
             "validation"_a = false)
        .def("messages", [](const InstanceHandle& instance) { return instance->messages(); })
        .def("physical_devices",
             [](const InstanceHandle& instance) {
                 py::list facts;
                 uint32_t index = 0;
                 for (const auto physical : instance->physical_devices()) {
                     facts.append(device_facts(instance->handle(), physical, index++));
                 }
                 return facts;
             })
        .def(
            "heaps",
            [](const InstanceHandle& instance, size_t index) {
                return heap_facts(instance->physical_device(index));
            },
            "index"_a)
        .def(
            "open",
            [](const InstanceHandle& instance, size_t index,
               const std::vector<std::string>& features) {
                *instance;
                return std::make_unique<Device>(
                    std::make_shared<Context>(instance.object, index, features));
            },
            "index"_a, "features"_a)
        .def("close", [](InstanceHandle& instance) { instance.object.reset(); });
}

py::array_t<uint8_t> buffer_view(const BufferHandle& buffer) {
    // The array owns a share of the memory: it stays mapped until the last view is gone.
    auto* const share = new std::shared_ptr<Memory>(buffer->memory());
    const py::capsule base(
        share, [](void* pointer) { delete static_cast<std::shared_ptr<Memory>*>(pointer); });
    return py::array_t<uint8_t>(static_cast<py::ssize_t>(buffer->n_bytes()),
                                static_cast<const uint8_t*>((*share)->mapped()), base);
}

void add_buffer(py::module_& module) {
    py::class_<BufferHandle>(module, "Buffer")
        .def_property_readonly("size", [](const BufferHandle& buffer) { return buffer->n_bytes(); })
        .def_property_readonly("address",
                               [](const BufferHandle& buffer) { return buffer->address(); })
        .def_property_readonly("memory_type",
                               [](const BufferHandle& buffer) { return buffer->memory_type(); })
        .def_property_readonly("name", [](const BufferHandle& buffer) { return buffer->name(); })
        .def_property_readonly("mapped",
                               [](const BufferHandle& buffer) { return buffer->is_mapped(); })
        .def("view", buffer_view)
        .def(
            "flush",
            [](const BufferHandle& buffer, uint64_t offset, uint64_t size) {
                buffer->require_range(offset, size);
                buffer->memory()->flush(offset, size);
            },
            "offset"_a, "size"_a)
        .def(
            "invalidate",
            [](const BufferHandle& buffer, uint64_t offset, uint64_t size) {
                buffer->require_range(offset, size);
                buffer->memory()->invalidate(offset, size);
            },
            "offset"_a, "size"_a)
        .def("close", [](BufferHandle& buffer) { buffer.object.reset(); });
}

/// The storage behind a Buffer or Tensor of Python.
std::shared_ptr<Storage> storage(const py::object& object) {
    if (py::isinstance<BufferHandle>(object)) {
        const auto& handle = object.cast<const BufferHandle&>();
        *handle;
        return handle.object;
    }
    if (py::isinstance<Tensor>(object)) return object.cast<std::shared_ptr<Tensor>>();
    throw py::type_error("expected a Buffer or a Tensor");
}

/// The members of a tuple; pybind11's conversion to std::tuple takes several times as long.
py::tuple triple(const py::handle& object) {
    if (!PyTuple_Check(object.ptr()) || PyTuple_GET_SIZE(object.ptr()) != 3) {
        throw py::type_error("expected copies (source, target, size) between places "
                             "(buffer, offset, address)");
    }
    return py::reinterpret_borrow<py::tuple>(object);
}

Copy copy_between_places(const py::handle& object) {
    const auto copy = triple(object), source = triple(copy[0]), target = triple(copy[1]);
    try {
        return {storage(source[0]), source[1].cast<uint64_t>(), storage(target[0]),
                target[1].cast<uint64_t>(), copy[2].cast<uint64_t>()};
    } catch (const py::cast_error&) {
        throw py::type_error("offsets and sizes are integers from 0 to 2**64 - 1");
    }
}

void add_commands(py::module_& module) {
    py::class_<Executable>(module, "Executable")
        .def_readonly("name", &Executable::name)
        .def_readonly("subgroup_size", &Executable::subgroup_size)
        .def_readonly("statistics", &Executable::statistics)
        .def_readonly("texts", &Executable::texts);
    py::class_<Tensor, std::shared_ptr<Tensor>>(module, "Tensor")
        .def_property_readonly("n_words", &Tensor::n_words)
        .def_property_readonly("name", &Tensor::name);
    py::class_<Kernel, std::shared_ptr<Kernel>>(module, "Kernel")
        .def_property_readonly("name", &Kernel::name)
        .def("executables", &Kernel::executables);
    py::class_<Recording, std::shared_ptr<Recording>>(module, "Recording")
        .def("timestamps", &Recording::timestamps);
    py::class_<Submission, std::shared_ptr<Submission>>(module, "Submission")
        .def("wait", &Submission::wait, "expected_ns"_a = 0, "timeout_ns"_a = 0)
        .def("done", &Submission::done)
        .def("interval", &Submission::interval);
    py::class_<Recorder>(module, "Recorder")
        .def(
            "dispatch",
            [](Recorder& recorder, std::shared_ptr<Kernel> kernel, std::array<uint32_t, 3> groups,
               const py::bytes& push) { recorder.dispatch(std::move(kernel), groups, push); },
            "kernel"_a.none(false), "groups"_a, "push"_a = py::bytes())
        .def("barrier", &Recorder::barrier)
        .def(
            "copy",
            [](Recorder& recorder, const py::object& src, uint64_t src_offset,
               const py::object& dst, uint64_t dst_offset, uint64_t size) {
                recorder.copy({{storage(src), src_offset, storage(dst), dst_offset, size}});
            },
            "src"_a, "src_offset"_a, "dst"_a, "dst_offset"_a, "size"_a)
        .def(
            "fill",
            [](Recorder& recorder, const py::object& dst, uint64_t offset, uint64_t size,
               uint32_t word) { recorder.fill(storage(dst), offset, size, word); },
            "dst"_a, "offset"_a, "size"_a, "word"_a)
        .def("timestamp", &Recorder::timestamp, "index"_a)
        .def("finish", &Recorder::finish);
}

void add_device(py::module_& module) {
    py::class_<Device>(module, "Device")
        .def(
            "buffer",
            [](Device& device, uint64_t size, uint32_t memory_type, const std::string& name) {
                return BufferHandle{device.buffer(size, memory_type, name)};
            },
            "size"_a, "memory_type"_a, "name"_a = "")
        .def("tensor", &Device::tensor, "n_words"_a, "name"_a = "")
        .def(
            "kernel",
            [](Device& device, const py::bytes& spirv,
               std::vector<std::shared_ptr<Tensor>> tensors, const std::vector<uint32_t>& spec,
               uint32_t push_bytes, const std::string& name, uint32_t subgroup_size, bool texts) {
                return device.kernel(spirv, std::move(tensors), spec, push_bytes, name,
                                     subgroup_size, texts);
            },
            "spirv"_a, "tensors"_a, "spec"_a, "push_bytes"_a, "name"_a = "",
            "subgroup_size"_a = 0, "texts"_a = false)
        .def("recorder", &Device::recorder, "n_timestamps"_a = 0, "queue"_a = "compute")
        .def(
            "submit",
            [](Device& device, std::shared_ptr<Recording> recording, const std::string& queue) {
                return device.submit({std::move(recording)}, queue);
            },
            "recording"_a.none(false), "queue"_a = "compute")
        .def(
            "submit",
            [](Device& device, const py::sequence& recordings, const std::string& queue) {
                Recordings given;
                for (const py::handle one : recordings) {
                    py::cast<Recording&>(one);  // refuses None
                    given.push_back(py::cast<std::shared_ptr<Recording>>(one));
                }
                return device.submit(given, queue);
            },
            "recordings"_a, "queue"_a = "compute")
        .def(
            "upload",
            [](Device& device, const py::sequence& arguments, bool timed) {
                std::vector<Copy> copies;
                copies.reserve(arguments.size());
                for (const py::object one : arguments) copies.push_back(copy_between_places(one));
                return device.upload(copies, timed);
            },
            "copies"_a, "timed"_a = false)
        .def_property_readonly("n_queues", &Device::n_queues)
        .def_property_readonly("has_upload_queue", &Device::has_upload_queue)
        .def("has_timestamps", &Device::has_timestamps, "queue"_a = "compute")
        .def_property_readonly("has_common_clock", &Device::has_common_clock)
        .def_property_readonly("lost", &Device::lost)
        .def("memory_bytes", &Device::memory_bytes)
        .def("memory_peak_bytes", &Device::memory_peak_bytes)
        .def("wait_idle", &Device::wait_idle)
        .def("settle", &Device::settle, "timeout_ns"_a, "only"_a = nullptr)
        .def("close", &Device::close,
             "timeout_ns"_a = static_cast<uint64_t>(kJoinLimit.count()));
}

}  // namespace

PYBIND11_MODULE(_native, module) {
    module.doc() = "Vulkan for vkmoe: Kompute's sequences, pipelines and tensors; our submission.";
    module.attr("kompute_version") = VKMOE_KOMPUTE_VERSION;
    add_exceptions(module);
    add_buffer(module);
    add_commands(module);
    add_device(module);
    add_instance(module);
    module.def("live_objects", live_objects);
    module.def(
        "inject_failure",
        [](const std::string& call, unsigned after, const std::string& result) {
            inject_failure(call, after, result_from_name(result));
        },
        "call"_a, "after"_a = 0, "result"_a = "VK_ERROR_OUT_OF_DEVICE_MEMORY");
    module.def("clear_injections", clear_injections);
    // No process may end with work in flight: drivers crash or hang in their own exit handlers.
    py::module_::import("atexit").attr("register")(py::cpp_function(join_all_devices));
}

}  // namespace vkmoe
