# The text of ort_moe_build_info(), as a macro of the file that exports it.

if(ORT_MOE_WITH_CUDA)
  list(JOIN CMAKE_CUDA_ARCHITECTURES "\", \"" architectures)
  set(cuda "{\"toolkit\": \"${CMAKE_CUDA_COMPILER_VERSION}\", \"architectures\": [\"${architectures}\"]}")
else()
  set(cuda null)
endif()
string(CONCAT build_info
  "{\"version\": \"${PROJECT_VERSION}\", "
  "\"cuda\": ${cuda}, "
  "\"ort_api_version\": ${ORT_MOE_ORT_API}, "
  "\"compiler\": \"${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}\"}")
file(CONFIGURE OUTPUT "${CMAKE_CURRENT_BINARY_DIR}/build_info.h" CONTENT [=[
// Written by cmake/BuildInfo.cmake.
#pragma once
#define ORT_MOE_BUILD_INFO R"(@build_info@)"
]=] @ONLY)
target_include_directories(ort_moe PRIVATE "${CMAKE_CURRENT_BINARY_DIR}")
