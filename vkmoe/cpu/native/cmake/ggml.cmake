# ggml's kernels for CPUs, from the source distribution of llama-cpp-python, which carries ggml.
#
# Set VKMOE_GGML_SDIST (CMake variable or environment) to a local copy to build without network, or
# VKMOE_GGML_SOURCE to the unpacked folder ggml of that release.
include("${CMAKE_CURRENT_LIST_DIR}/../../../gpu/native/cmake/sdist.cmake")
set(VKMOE_GGML_VERSION "0.3.36")  # of llama-cpp-python
set(VKMOE_GGML_SHA256 "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e")
set(VKMOE_GGML_SOURCE "$ENV{VKMOE_GGML_SOURCE}" CACHE PATH "ggml's sources, instead of a download")
set(ggml_source "${VKMOE_GGML_SOURCE}")
if(NOT ggml_source)
    fetch_sdist(VKMOE_GGML llama_cpp_python "${VKMOE_GGML_VERSION}" "${VKMOE_GGML_SHA256}")
    set(ggml_source
        "${VKMOE_GGML_SDIST_DIR}/llama_cpp_python-${VKMOE_GGML_VERSION}/vendor/llama.cpp/ggml")
    if(NOT EXISTS "${ggml_source}/CMakeLists.txt")
        file(ARCHIVE_EXTRACT INPUT "${VKMOE_GGML_SDIST_PATH}" DESTINATION "${VKMOE_GGML_SDIST_DIR}"
             PATTERNS "*/vendor/llama.cpp/ggml/*" "*/vendor/llama.cpp/LICENSE")
    endif()
endif()

# Its kernels alone are wanted: rows are shared out among threads by vkmoe, so that the order of
# every sum is fixed, and weights are read as the file has them.
enable_language(C)
set(BUILD_SHARED_LIBS OFF)
set(GGML_OPENMP OFF)
set(GGML_CPU_REPACK OFF)
set(GGML_LLAMAFILE OFF)
set(GGML_ACCELERATE OFF)
set(GGML_CCACHE OFF)
set(GGML_ALL_WARNINGS OFF)
if(VKMOE_CPU_VARIANTS)  # each adds what it has to what any processor of the architecture has
    foreach(feature NATIVE SSE42 AVX AVX2 BMI2 FMA F16C)
        set(GGML_${feature} OFF)
    endforeach()
endif()
add_subdirectory("${ggml_source}" "${CMAKE_CURRENT_BINARY_DIR}/ggml" EXCLUDE_FROM_ALL)
