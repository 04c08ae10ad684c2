// Bytes, rates and seconds as people write and read them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "smartinf/base/status.h"

namespace smartinf::base {

inline constexpr uint64_t kKiB = uint64_t{1} << 10;
inline constexpr uint64_t kMiB = uint64_t{1} << 20;
inline constexpr uint64_t kGiB = uint64_t{1} << 30;

/// "512 MiB", "1.50 GiB": binary units, three significant digits.
std::string format_bytes(uint64_t bytes);
/// "2.10 GB/s": decimal units, as drives and links are sold.
std::string format_rate(double bytes_per_second);
/// "1.25 billion".
std::string format_count(double count);
/// "1.25 s", "38 ms", "2 min 05 s".
std::string format_seconds(double seconds);

/// Reads "512MiB", "4 GiB", "1.5GB", "65536". Decimal units (KB, MB, GB, TB) are powers of 1000.
Result<uint64_t> parse_bytes(std::string_view text);

/// The smallest multiple of `unit` that is not below `value`. unit > 0.
constexpr uint64_t round_up(uint64_t value, uint64_t unit) {
  return (value + unit - 1) / unit * unit;
}
constexpr uint64_t divide_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit; }

}  // namespace smartinf::base
