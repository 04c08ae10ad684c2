#include "smartinf/engine/ranks/messages.h"

#include <optional>
#include <utility>

namespace smartinf::engine {

using base::ErrorCode;
using base::Status;

MessageWriter& MessageWriter::status(const Status& status) {
  value(status.code());
  if (status.ok()) return *this;
  const base::ErrorPlace& place = status.place();
  text(status.what()).text(status.advice()).text(place.path);
  value(uint8_t{place.offset_bytes.has_value()}).value(place.offset_bytes.value_or(0));
  value(uint8_t{place.length_bytes.has_value()}).value(place.length_bytes.value_or(0));
  return value(place.system_errno);
}

Status MessageReader::status() {
  const auto code = value<ErrorCode>();
  if (!ok_ || code == ErrorCode::kOk) return Status();
  std::string what = text();
  std::string advice = text();
  base::ErrorPlace place;
  place.path = text();
  const auto optional = [&]() -> std::optional<uint64_t> {
    const bool given = value<uint8_t>() != 0;
    const auto number = value<uint64_t>();
    return given ? std::optional(number) : std::nullopt;
  };
  place.offset_bytes = optional();
  place.length_bytes = optional();
  place.system_errno = value<int>();
  return Status(code, std::move(what), std::move(advice), std::move(place));
}

}  // namespace smartinf::engine
