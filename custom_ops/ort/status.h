// Errors: thrown inside the library, turned into an OrtStatus at its C boundary.
#pragma once

#include <onnxruntime_c_api.h>

#include <exception>
#include <stdexcept>
#include <string>

namespace ort_moe {

// One clause or sentence for the user, and ORT's code for it.
class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message, OrtErrorCode code = ORT_INVALID_ARGUMENT)
      : std::runtime_error(message), code_(code) {}
  OrtErrorCode code() const { return code_; }

 private:
  OrtErrorCode code_;
};

// True on success; a failed status is released.
inline bool Succeeds(const OrtApi& api, OrtStatus* status) {
  if (status == nullptr) return true;
  api.ReleaseStatus(status);
  return false;
}

// Throws what `status` says.
inline void Check(const OrtApi& api, OrtStatus* status) {
  if (status == nullptr) return;
  const Error error(api.GetErrorMessage(status), api.GetErrorCode(status));
  api.ReleaseStatus(status);
  throw error;
}

// Runs `body`; what it throws becomes the status, with `where` in front. No exception leaves.
template <typename Body>
OrtStatus* Guard(const OrtApi& api, const std::string& where, Body&& body) noexcept {
  const auto refuse = [&](OrtErrorCode code, const char* what) noexcept {
    try {
      return api.CreateStatus(code, (where + ": " + what).c_str());
    } catch (...) {  // no memory for the sentence
      return api.CreateStatus(ORT_FAIL, "ort_moe: out of memory");
    }
  };
  try {
    body();
    return nullptr;
  } catch (const Error& error) {
    return refuse(error.code(), error.what());
  } catch (const std::exception& error) {
    return refuse(ORT_RUNTIME_EXCEPTION, error.what());
  } catch (...) {
    return refuse(ORT_RUNTIME_EXCEPTION, "unknown exception");
  }
}

}  // namespace ort_moe
