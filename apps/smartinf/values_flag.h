// --values of the benches: what is sent of a compressed gradient's elements.
#pragma once

#include <optional>
#include <string>

#include <CLI/CLI.hpp>

#include "smartinf/compress/message.h"

namespace smartinf::apps {

inline void add_values_flag(CLI::App& command, std::optional<compress::ValueEncoding>& values,
                            const std::string& usual) {
  command
      .add_option_function<std::string>(
          "--values",
          [&values](const std::string& name) {
            values = base::enum_from_name<compress::ValueEncoding>(name);
          },
          "Encoding of a sent element of compressed gradients: f32, bf16, f16 or sign [" + usual +
              "]")
      ->check(CLI::IsMember(base::enum_name_list<compress::ValueEncoding>()));
}

}  // namespace smartinf::apps
