# The variants of ggml's kernels, from the one that any processor runs to the most particular.

# The variants of an architecture, with what they add to its compiler flags.
#
# Few, as each adds 2 MB to an install. Weights per second of Q4_K on a Zen 5, of one vector and of
# 256: x64 1.7 and 1.5 G, avx2 24 and 52, avx512_vnni 25 and 110. VBMI adds nothing there, BF16 helps
# weights in BF16 alone. Not measured: AVX-VNNI, and what is for ARM.
macro(add_variants)
    if(NOT VKMOE_CPU_VARIANTS)
        add_variant(native)
    elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
        set(avx2 -mavx2 -mfma -mf16c -mbmi2)
        set(avx512 -mavx512f -mavx512cd -mavx512bw -mavx512dq -mavx512vl -mavx512vnni)
        add_variant(x64)
        add_variant(avx2 ${avx2})
        add_variant(avx512_vnni ${avx2} ${avx512})
    elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64")
        add_variant(armv8)
        add_variant(dotprod -march=armv8.2-a+dotprod)
    else()
        add_variant(any)
    endif()
endmacro()

# Makes ggml-cpu-NAME: ggml-cpu compiled with more flags. ggml's own way to have several makes
# libraries that are loaded with dlopen, and leaves out the functions that are called here.
function(add_ggml_for name)
    get_target_property(sources ggml-cpu SOURCES)
    list(FILTER sources EXCLUDE REGEX "\\.h$")
    list(TRANSFORM sources PREPEND "${ggml_source}/src/")
    add_library(ggml-cpu-${name} STATIC EXCLUDE_FROM_ALL ${sources})
    foreach(property COMPILE_DEFINITIONS COMPILE_FEATURES COMPILE_OPTIONS INCLUDE_DIRECTORIES
                     LINK_LIBRARIES)
        get_target_property(value ggml-cpu ${property})
        if(value)
            set_target_properties(ggml-cpu-${name} PROPERTIES ${property} "${value}")
        endif()
    endforeach()
    get_directory_property(definitions DIRECTORY "${ggml_source}/src" COMPILE_DEFINITIONS)
    target_compile_definitions(ggml-cpu-${name} PRIVATE ${definitions})
    target_compile_options(ggml-cpu-${name} PRIVATE ${ARGN})
endfunction()
