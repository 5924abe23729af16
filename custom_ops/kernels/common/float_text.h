// A float for a sentence: the shortest decimal that reads back as it, in no locale.
#pragma once

#include <charconv>
#include <string>

namespace ort_moe {

inline std::string FloatText(float value) {
  char text[32];
  const auto end = std::to_chars(text, text + sizeof text, value).ptr;
  return std::string(text, end);
}

}  // namespace ort_moe
