# Kompute's C++ library, from the source distribution of its Python package.
#
# Set VKMOE_KP_SDIST (CMake variable or environment) to a local copy to build without network.
include("${CMAKE_CURRENT_LIST_DIR}/sdist.cmake")
set(VKMOE_KP_VERSION "0.9.0")
set(VKMOE_KP_SHA256 "98e583dc6e9731ff6d7a3e3317817e4d93f7b2945929619e29a56325db279949")
fetch_sdist(VKMOE_KP kp "${VKMOE_KP_VERSION}" "${VKMOE_KP_SHA256}")

set(kp_source "${VKMOE_KP_SDIST_DIR}/kp-${VKMOE_KP_VERSION}")
if(NOT EXISTS "${kp_source}/CMakeLists.txt")
    file(ARCHIVE_EXTRACT INPUT "${VKMOE_KP_SDIST_PATH}" DESTINATION "${VKMOE_KP_SDIST_DIR}")
endif()

# Three of Kompute's classes are used: Algorithm, Sequence and Tensor. Only their sources are compiled.
# Its own CMake project would also build its Manager, which does not compile with the Vulkan headers
# of 2025, and would clone headers from a git host. Its log is switched off.
find_package(fmt REQUIRED)
add_library(kompute STATIC EXCLUDE_FROM_ALL
    "${kp_source}/src/Algorithm.cpp"
    "${kp_source}/src/Sequence.cpp"
    "${kp_source}/src/Tensor.cpp")
target_include_directories(kompute SYSTEM PUBLIC "${kp_source}/src/include")
# fmt header-only: a wheel built on one machine needs no library of fmt on another.
target_link_libraries(kompute PUBLIC Vulkan::Vulkan fmt::fmt-header-only)
# Dispatch through a table that this extension fills (kompute_calls.cpp): Kompute ignores most
# results, so every call it makes is checked, counted and can be made to fail there.
target_compile_definitions(kompute PUBLIC
    KOMPUTE_OPT_LOG_LEVEL_DISABLED=1 VULKAN_HPP_DISPATCH_LOADER_DYNAMIC=1)
target_compile_options(kompute PRIVATE -w)
# vulkan.hpp takes seconds to parse: once instead of three times.
set_target_properties(kompute PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 0)
