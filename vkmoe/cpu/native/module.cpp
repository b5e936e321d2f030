// The Python face of the CPU device.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "formats.hpp"
#include "pool.hpp"

namespace py = pybind11;
using namespace pybind11::literals;

namespace vkmoe {

namespace {

template <class Number>
using Array = py::array_t<Number, py::array::c_style>;

constexpr size_t kRowsAtOnce = 64;  // that a thread takes: enough for prefetching, few to steal

void require(bool holds, const std::string& what) {
    if (!holds) throw py::value_error(what);
}

py::dict described(const Format& format) {
    return py::dict("name"_a = format.name, "type"_a = static_cast<int>(format.type),
                    "block_weights"_a = format.block_weights, "block_bytes"_a = format.block_bytes,
                    "input"_a = static_cast<int>(format.input));
}

Array<float> multiply(Pool& pool, int type, const Array<uint8_t>& rows, const Array<float>& vector) {
    const Format& format = format_of(type);
    require(rows.ndim() == 2 && vector.ndim() == 1, "rows are not [n_rows, row_bytes], or a vector");
    const auto n_rows = static_cast<size_t>(rows.shape(0)), row_bytes = static_cast<size_t>(rows.shape(1));
    const auto n_columns = static_cast<size_t>(vector.size());
    require(format.takes(n_columns) && format.row_bytes(n_columns) == row_bytes,
            "a row is not of whole blocks, or not as long as the vector");
    Array<float> products(static_cast<py::ssize_t>(n_rows));
    std::vector<uint8_t> input(format.input_bytes(n_columns));
    const uint8_t* const first = rows.data();
    const float* const values = vector.data();
    float* const found = products.mutable_data();
    const std::vector<Step> steps{
        {1, [&](size_t, size_t) { format.quantise(values, input.data(), n_columns); }, false},
        {(n_rows + kRowsAtOnce - 1) / kRowsAtOnce,
         [&](size_t item, size_t) {
             const size_t end = std::min(n_rows, (item + 1) * kRowsAtOnce);
             for (size_t row = item * kRowsAtOnce; row < end; ++row) {
                 found[row] = format.dot(first + row * row_bytes, input.data(), n_columns);
             }
         },
         true},
    };
    {
        const py::gil_scoped_release released;
        pool.run(steps);
    }
    return products;
}

}  // namespace

}  // namespace vkmoe

PYBIND11_MODULE(_native, module) {
    using namespace vkmoe;
    module.attr("ggml_version") = VKMOE_GGML_VERSION;
    module.def("features", &kernel_features);
    module.def("formats", [] {
        py::list all;
        for (const Format& format : formats()) all.append(described(format));
        return all;
    });
    py::class_<Pool>(module, "Pool")
        .def(py::init<size_t>(), "n_threads"_a)
        .def_property_readonly("n_threads", &Pool::n_threads);
    module.def("multiply", &multiply, "pool"_a, "type"_a, "rows"_a, "vector"_a);
}
