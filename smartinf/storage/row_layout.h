// Tables of a device's rows, as their file is made for them (row_file.h).
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "smartinf/base/enum_names.h"
#include "smartinf/storage/store.h"

namespace smartinf::storage {

enum class RowTableKind : uint8_t {
  kState,    // updated by steps and committed with them
  kData,     // written before the first commit, then read only
  kScratch,  // written at any time and gone when the file is closed
};
inline constexpr std::array<std::string_view, 3> kRowTableKindNames{"state", "data", "scratch"};
constexpr base::EnumNames enum_names(RowTableKind) { return kRowTableKindNames; }

struct RowTableLayout {
  std::string name;
  RowTableKind kind = RowTableKind::kState;
  uint32_t record_bytes = 0;
  uint64_t rows = 0;  // on this device, numbered from 0

  friend bool operator==(const RowTableLayout&, const RowTableLayout&) = default;
};

/// Layout that a file is created with and keeps for life.
struct RowFileLayout {
  RunId run;
  uint32_t device_index = 0;
  uint32_t device_count = 1;
  uint64_t log_bytes = 0;  // rounded down to whole pages of the log
  std::vector<RowTableLayout> tables;
  std::string description;  // opaque here

  friend bool operator==(const RowFileLayout&, const RowFileLayout&) = default;
};

}  // namespace smartinf::storage
