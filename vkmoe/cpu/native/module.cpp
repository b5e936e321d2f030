// The Python face of the CPU device.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>

#include <ggml-cpu.h>

#include "experts.hpp"
#include "formats.hpp"
#include "kernels.hpp"
#include "pool.hpp"
#include "program.hpp"

namespace py = pybind11;
using namespace pybind11::literals;

namespace vkmoe {

namespace {

using Array = py::array_t<uint32_t, py::array::c_style>;
using Bytes = py::array_t<uint8_t, py::array::c_style>;
using Floats = py::array_t<float, py::array::c_style>;

py::dict described(const Format& format) {
    return py::dict("name"_a = format.name, "type"_a = static_cast<int>(format.type),
                    "block_weights"_a = format.block_weights, "block_bytes"_a = format.block_bytes,
                    "input"_a = static_cast<int>(format.input));
}

Bytes quantise(int type, const Floats& weights, const Floats& importance) {
    const std::vector<Format>& all = formats();
    const auto format = std::find_if(all.begin(), all.end(), [&](const Format& each) {
        return each.type == type;
    });
    if (format == all.end()) throw py::value_error("no such type of weights");
    if (weights.ndim() != 2 || weights.size() == 0) throw py::value_error("not rows of weights");
    const auto n_rows = weights.shape(0), n_columns = weights.shape(1);
    if (n_columns % static_cast<py::ssize_t>(format->block_weights) != 0) {
        throw py::value_error("rows are not whole blocks");
    }
    if (importance.size() != n_columns) throw py::value_error("not one importance for a column");
    const size_t row_bytes = ggml_row_size(format->type, n_columns);
    Bytes out({n_rows, static_cast<py::ssize_t>(row_bytes)});
    const float* const from = weights.data();
    void* const to = out.mutable_data();
    const float* const matters = importance.data();
    const py::gil_scoped_release released;
    ggml_quantize_chunk(format->type, from, to, 0, n_rows, n_columns, matters);
    return out;
}

/// A program with what its commands reach, kept alive.
class Recording {
public:
    Recording(std::shared_ptr<Regions> regions, std::shared_ptr<Scratch> scratch)
        : regions_(std::move(regions)), scratch_(std::move(scratch)) {}

    void dispatch(const std::string& kernel, const std::string& variant, const py::dict& numbers,
                  const py::dict& tensors, const std::array<size_t, 3>& groups, bool waits) {
        if (waits) scratch_->reuse();
        Call call{variant, {}, {}, groups, regions_.get(), scratch_};
        for (const auto& [name, number] : numbers) {
            const auto key = py::cast<std::string>(name);
            if (py::isinstance<py::float_>(number)) {
                call.numbers[key] = py::cast<double>(number);
            } else {
                call.numbers[key] = py::cast<uint64_t>(number);
            }
        }
        for (const auto& [name, tensor] : tensors) {
            if (!py::isinstance<Array>(tensor)) throw py::type_error("a tensor is not of uint32");
            const auto array = py::reinterpret_borrow<Array>(tensor);
            call.tensors[py::cast<std::string>(name)] = words_of(array);
        }
        program_.dispatch(kernel, call, waits);
    }

    void copy(const Bytes& source, Bytes target, bool waits) {
        if (source.size() != target.size()) throw py::value_error("not as many bytes");
        program_.copy(source.data(), target.mutable_data(), static_cast<size_t>(source.size()), waits);
        kept_.push_back(source);
        kept_.push_back(std::move(target));
    }

    void fill(const Array& target, uint32_t word, bool waits) {
        const Words to = words_of(target);
        program_.fill(static_cast<uint32_t*>(to.data), to.n_words, word, waits);
    }

    void run(Pool& pool) const {
        const py::gil_scoped_release released;
        program_.run(pool);
    }

    size_t n_steps() const { return program_.n_steps(); }

private:
    Words words_of(Array array) {
        const Words words{array.mutable_data(), static_cast<size_t>(array.size())};
        kept_.push_back(std::move(array));
        return words;
    }

    std::shared_ptr<Regions> regions_;
    std::shared_ptr<Scratch> scratch_;
    Program program_;
    std::vector<py::array> kept_;
};

}  // namespace

}  // namespace vkmoe

// CMake names the module after the variant. Its classes are its own: tests import several.
PYBIND11_MODULE(VKMOE_MODULE, module) {
    using namespace vkmoe;
    ggml_cpu_init();  // fills the table of f16, which is looked up where no instruction converts
    module.attr("ggml_version") = VKMOE_GGML_VERSION;
    module.def("features", &kernel_features);
    module.def("kernels", &kernel_names);
    module.def("n_read_ahead", &n_read_ahead);
    module.def("formats", [] {
        py::list all;
        for (const Format& format : formats()) all.append(described(format));
        return all;
    });
    module.def("quantise", &quantise, "type"_a, py::arg("weights").noconvert(),
               py::arg("importance").noconvert());
    py::class_<Pool>(module, "Pool", py::module_local())
        .def(py::init<size_t>(), "n_threads"_a)
        .def_property_readonly("n_threads", &Pool::n_threads);
    py::class_<Regions, std::shared_ptr<Regions>>(module, "Regions", py::module_local())
        .def(py::init<>())
        .def("add", &Regions::add, "address"_a, "n_bytes"_a)
        .def("remove", &Regions::remove, "address"_a)
        .def("set_scale", &Regions::set_scale, "address"_a, "scale"_a);
    py::class_<Scratch, std::shared_ptr<Scratch>>(module, "Scratch", py::module_local())
        .def(py::init<>());
    py::class_<Recording>(module, "Recording", py::module_local())
        .def(py::init<std::shared_ptr<Regions>, std::shared_ptr<Scratch>>(), "regions"_a,
             "scratch"_a)
        .def("dispatch", &Recording::dispatch, "kernel"_a, "variant"_a, "numbers"_a, "tensors"_a,
             "groups"_a, "waits"_a = true)
        .def("copy", &Recording::copy, py::arg("source").noconvert(),
             py::arg("target").noconvert(), "waits"_a = true)
        .def("fill", &Recording::fill, py::arg("target").noconvert(), "word"_a, "waits"_a = true)
        .def("run", &Recording::run, "pool"_a)
        .def_property_readonly("n_steps", &Recording::n_steps);
}
