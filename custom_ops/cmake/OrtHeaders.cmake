# Finds the C headers of ONNX Runtime (no Python wheel ships them) and sets
#   ORT_MOE_ORT_HEADERS  the folder of onnxruntime_c_api.h
#   ORT_MOE_ORT_API      the version of the C API in it

set(ORT_INCLUDE_DIR "" CACHE PATH "Folder with ONNX Runtime's C headers; empty: search")
set(fetched_headers "${CMAKE_CURRENT_SOURCE_DIR}/../build/ort-headers")

set(places "")
if(ORT_INCLUDE_DIR)
  set(given "${ORT_INCLUDE_DIR}")
elseif(DEFINED ENV{ORT_INCLUDE_DIR})
  set(given "$ENV{ORT_INCLUDE_DIR}")
endif()
if(DEFINED given)
  set(places "${given}")
else()
  set(places "${fetched_headers}" /usr/include /usr/local/include)
endif()
# Not cached: another ORT_INCLUDE_DIR shall take effect on the next run.
find_path(ORT_MOE_ORT_HEADERS onnxruntime_c_api.h
  PATHS ${places}
  PATH_SUFFIXES onnxruntime onnxruntime/core/session include include/onnxruntime core/session
  NO_DEFAULT_PATH NO_CACHE)

if(NOT ORT_MOE_ORT_HEADERS)
  list(JOIN places ", " searched)
  message(FATAL_ERROR
    "ONNX Runtime's C headers (onnxruntime_c_api.h) are not in ${searched}. Do one of:\n"
    "  - run scripts/ort_headers.sh, which puts them into build/ort-headers;\n"
    "  - install the package libonnxruntime-dev;\n"
    "  - unpack ONNX Runtime's release archive and set ORT_INCLUDE_DIR (environment, or -DORT_INCLUDE_DIR=...) to its "
    "include folder.")
endif()

file(STRINGS "${ORT_MOE_ORT_HEADERS}/onnxruntime_c_api.h" line REGEX "^#define ORT_API_VERSION [0-9]+")
string(REGEX MATCH "[0-9]+" ORT_MOE_ORT_API "${line}")
if(ORT_MOE_ORT_API LESS 18)
  message(FATAL_ERROR "The headers in ${ORT_MOE_ORT_HEADERS} are of ONNX Runtime 1.${ORT_MOE_ORT_API}; "
    "1.18 or newer are needed: see ORT_INCLUDE_DIR")
endif()
message(STATUS "ort_moe: ONNX Runtime C API ${ORT_MOE_ORT_API} from ${ORT_MOE_ORT_HEADERS}")
