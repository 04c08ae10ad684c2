// --values of the benches: what is sent of a compressed gradient's elements.
#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "smartinf/compress/message.h"

namespace smartinf::apps {

inline void add_values_flag(CLI::App& command, std::optional<compress::ValueEncoding>& values,
                            const std::string& usual) {
  const auto& names = compress::kValueEncodingNames;
  command
      .add_option_function<std::string>(
          "--values",
          [&values](const std::string& name) {
            const auto found = std::find(names.begin(), names.end(), name);
            values = static_cast<compress::ValueEncoding>(found - names.begin());
          },
          "Encoding of a sent element of compressed gradients: f32, bf16, f16 or sign [" + usual +
              "]")
      ->check(CLI::IsMember(std::vector<std::string>(names.begin(), names.end())));
}

}  // namespace smartinf::apps
