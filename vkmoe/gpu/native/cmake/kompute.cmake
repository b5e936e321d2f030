# Kompute's C++ library, from the source distribution of its Python package.
#
# The sdist is downloaded with pip at configure time; pip checks its SHA-256 before it runs its
# setup.py, and every configure checks it again. Set VKMOE_KP_SDIST (CMake variable or
# environment) to a local copy to build without network.
set(VKMOE_KP_VERSION "0.9.0")
set(VKMOE_KP_SHA256 "98e583dc6e9731ff6d7a3e3317817e4d93f7b2945929619e29a56325db279949")

set(VKMOE_KP_SDIST "$ENV{VKMOE_KP_SDIST}" CACHE FILEPATH "Local kp sdist instead of a download")
set(kp_download_dir "${CMAKE_CURRENT_BINARY_DIR}/kp")
if(VKMOE_KP_SDIST)
    set(kp_sdist "${VKMOE_KP_SDIST}")
else()
    set(kp_sdist "${kp_download_dir}/kp-${VKMOE_KP_VERSION}.tar.gz")
endif()

if(NOT EXISTS "${kp_sdist}")
    if(VKMOE_KP_SDIST)
        message(FATAL_ERROR "VKMOE_KP_SDIST names no file: ${kp_sdist}")
    endif()
    file(WRITE "${kp_download_dir}/requirements.txt"
         "kp==${VKMOE_KP_VERSION} --hash=sha256:${VKMOE_KP_SHA256}\n")
    execute_process(
        COMMAND "${Python_EXECUTABLE}" -m pip download --quiet --no-deps --no-binary :all:
                --no-build-isolation --require-hashes --dest "${kp_download_dir}"
                --requirement "${kp_download_dir}/requirements.txt"
        RESULT_VARIABLE kp_result)
    if(NOT kp_result EQUAL 0)
        message(FATAL_ERROR "pip could not download kp ${VKMOE_KP_VERSION}; "
                            "set VKMOE_KP_SDIST to a local copy of kp-${VKMOE_KP_VERSION}.tar.gz")
    endif()
endif()

file(SHA256 "${kp_sdist}" kp_sha256)
if(NOT kp_sha256 STREQUAL VKMOE_KP_SHA256)
    if(NOT VKMOE_KP_SDIST)
        file(REMOVE "${kp_sdist}")  # so that the next configure downloads it again
    endif()
    message(FATAL_ERROR "${kp_sdist} has SHA-256 ${kp_sha256}, expected ${VKMOE_KP_SHA256}")
endif()
set(kp_source "${kp_download_dir}/kp-${VKMOE_KP_VERSION}")
if(NOT EXISTS "${kp_source}/CMakeLists.txt")
    file(ARCHIVE_EXTRACT INPUT "${kp_sdist}" DESTINATION "${kp_download_dir}")
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
