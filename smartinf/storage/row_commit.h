// The commit record of a device's row tables, behind the client metadata of the step that it is of.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>

namespace smartinf::storage {

inline constexpr std::string_view kRowCommitMagic = "SIROWS01";

/// stored := client-metadata record u32{record bytes} magic; without a record the metadata alone.
inline std::string join_row_commit(std::string client_metadata, std::string_view record) {
  if (record.empty()) return client_metadata;
  const auto size = static_cast<uint32_t>(record.size());
  client_metadata.append(record);
  client_metadata.append(reinterpret_cast<const char*>(&size), sizeof size);
  return client_metadata.append(kRowCommitMagic);
}

struct CommittedTexts {
  std::string client_metadata;
  std::string record;  // empty: the step is of a device without tables
};

/// The way back.
inline CommittedTexts split_row_commit(std::string stored) {
  constexpr size_t kEnd = sizeof(uint32_t) + kRowCommitMagic.size();
  if (stored.size() < kEnd || !stored.ends_with(kRowCommitMagic)) return {std::move(stored), {}};
  uint32_t size = 0;
  std::memcpy(&size, stored.data() + stored.size() - kEnd, sizeof size);
  if (size > stored.size() - kEnd) return {std::move(stored), {}};
  const size_t metadata = stored.size() - kEnd - size;
  return {stored.substr(0, metadata), stored.substr(metadata, size)};
}

}  // namespace smartinf::storage
