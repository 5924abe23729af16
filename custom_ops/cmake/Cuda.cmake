# Decides on the CUDA kernels: sets ORT_MOE_WITH_CUDA and, with it, enables the language.
#
# CMAKE_CUDA_ARCHITECTURES: by default Hopper alone, which builds fast. Releases take
#   -DCMAKE_CUDA_ARCHITECTURES="80-real;86-real;89-real;90a-real;100-real;120"
# machine code for Ampere to Blackwell, and PTX of the newest for what comes after.

set(ORT_MOE_CUDA AUTO CACHE STRING "CUDA kernels: AUTO (where nvcc is found), ON or OFF")
set_property(CACHE ORT_MOE_CUDA PROPERTY STRINGS AUTO ON OFF)

set(ORT_MOE_WITH_CUDA OFF)
if(ORT_MOE_CUDA STREQUAL AUTO OR ORT_MOE_CUDA)
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(ORT_MOE_WITH_CUDA ON)
  elseif(NOT ORT_MOE_CUDA STREQUAL AUTO)
    message(FATAL_ERROR "ORT_MOE_CUDA=ON, but there is no nvcc: install the CUDA toolkit 13 and put its bin folder on "
      "the PATH, or set CUDACXX to nvcc; ORT_MOE_CUDA=OFF builds the CPU kernels alone")
  endif()
endif()

if(ORT_MOE_WITH_CUDA)
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 90a)
  endif()
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static)  # ORT brings its own; the two share the device's context
  enable_language(CUDA)
  set(CMAKE_CUDA_STANDARD 17)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  find_package(CUDAToolkit REQUIRED)
  include_directories(SYSTEM ${CUDAToolkit_INCLUDE_DIRS})
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
    add_compile_options($<$<COMPILE_LANGUAGE:CUDA>:-compress-mode=size>)
  endif()
  message(STATUS "ort_moe: CPU and CUDA kernels (nvcc ${CMAKE_CUDA_COMPILER_VERSION}, architectures "
    "${CMAKE_CUDA_ARCHITECTURES})")
else()
  message(STATUS "ort_moe: CPU kernels only (ORT_MOE_CUDA=${ORT_MOE_CUDA})")
endif()
