#include "apps/smartinf/wear.h"

#include <fmt/format.h>

#include "smartinf/base/units.h"

namespace smartinf::apps {

std::string drive_wear_text(const DriveFacts& drive) {
  if (!drive.wear_share && !drive.written_bytes) return {};
  std::string text;
  if (drive.wear_share)
    text = fmt::format("{:.0f}% of its rated life used", *drive.wear_share * 100);
  if (drive.written_bytes) {
    text += fmt::format("{}{} written", text.empty() ? "" : ", ",
                        base::format_bytes(*drive.written_bytes));
  }
  return text + fmt::format(" (by {})", drive.wear_source);
}

std::string wear_text(uint64_t written_bytes, uint64_t rated_bytes, const DriveFacts& drive) {
  std::string text = base::format_bytes(written_bytes) + " by this state";
  if (rated_bytes > 0) {
    text +=
        fmt::format(", {:.3g}% of the {} the drive is rated for",
                    100.0 * static_cast<double>(written_bytes) / static_cast<double>(rated_bytes),
                    base::format_bytes(rated_bytes));
  }
  if (const std::string wear = drive_wear_text(drive); !wear.empty()) {
    text += "; the drive: " + wear;
  }
  return text;
}

}  // namespace smartinf::apps
