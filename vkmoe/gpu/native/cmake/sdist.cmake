# Brings the source distribution of a Python package here, checked.
#
# fetch_sdist(PREFIX package version sha256) sets <PREFIX>_SDIST_PATH. The sdist is downloaded with
# pip at configure time; pip checks its SHA-256 before it runs any of its code, and every configure
# checks it again. <PREFIX>_SDIST (CMake variable or environment) names a local copy to build without
# network.
function(fetch_sdist prefix package version sha256)
    string(REPLACE "VKMOE_" "" folder "${prefix}")
    string(TOLOWER "${folder}" folder)
    set(${prefix}_SDIST "$ENV{${prefix}_SDIST}" CACHE FILEPATH
        "Local ${package} sdist instead of a download")
    set(download_dir "${CMAKE_BINARY_DIR}/${folder}")
    set(sdist "${download_dir}/${package}-${version}.tar.gz")
    if(${prefix}_SDIST)
        set(sdist "${${prefix}_SDIST}")
    endif()

    if(NOT EXISTS "${sdist}")
        if(${prefix}_SDIST)
            message(FATAL_ERROR "${prefix}_SDIST names no file: ${sdist}")
        endif()
        file(WRITE "${download_dir}/requirements.txt"
             "${package}==${version} --hash=sha256:${sha256}\n")
        execute_process(
            COMMAND "${Python_EXECUTABLE}" -m pip download --quiet --no-deps --no-binary :all:
                    --no-build-isolation --require-hashes --dest "${download_dir}"
                    --requirement "${download_dir}/requirements.txt"
            RESULT_VARIABLE result)
        if(NOT result EQUAL 0)
            message(FATAL_ERROR "pip could not download ${package} ${version}; set ${prefix}_SDIST "
                                "to a local copy of ${package}-${version}.tar.gz")
        endif()
    endif()

    file(SHA256 "${sdist}" found)
    if(NOT found STREQUAL sha256)
        if(NOT ${prefix}_SDIST)
            file(REMOVE "${sdist}")  # so that the next configure downloads it again
        endif()
        message(FATAL_ERROR "${sdist} has SHA-256 ${found}, expected ${sha256}")
    endif()
    set(${prefix}_SDIST_PATH "${sdist}" PARENT_SCOPE)
    set(${prefix}_SDIST_DIR "${download_dir}" PARENT_SCOPE)
endfunction()
