#include "python/core/ranks.h"

#include <cstring>
#include <utility>

#include <nanobind/stl/string.h>

#include "python/core/errors.h"

namespace nb = nanobind;

namespace smartinf::python {
namespace {

using base::ErrorCode;
using base::Status;
using engine::Channel;

/// A call that has ended.
class Ended final : public engine::Collectives::Pending {
 public:
  Status wait() override { return Status(); }
};

/// The GIL is held.
Status status_of(nb::handle error) {
  const std::string code = nb::cast<std::string>(nb::getattr(error, "code", nb::str("")));
  const std::string advice = nb::cast<std::string>(nb::getattr(error, "advice", nb::str("")));
  std::string text = nb::cast<std::string>(nb::str(error));
  // What the core has made ends with its advice, which is added again.
  if (const size_t at = text.rfind(advice); !advice.empty() && at != std::string::npos) {
    text.resize(at);
    while (!text.empty() && (text.back() == ' ' || text.back() == '.')) text.pop_back();
  }
  ErrorCode known = ErrorCode::kIo;
  for (int i = 1; i <= static_cast<int>(base::kErrorCodeLast); ++i) {
    const auto one = static_cast<ErrorCode>(i);
    if (base::error_code_name(one) == code) known = one;
  }
  return Status(known, std::move(text), advice);
}

/// call() with the GIL; what it raises, but for what ends the program (KeyboardInterrupt).
template <typename Call>
engine::Collectives::Started with_gil(const Call& call) {
  const nb::gil_scoped_acquire acquired;
  try {
    call();
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_Exception)) throw;
    return status_of(error.value());
  }
  return std::unique_ptr<engine::Collectives::Pending>(std::make_unique<Ended>());
}

nb::bytes bytes_of(std::span<const std::byte> bytes) {
  return nb::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

std::string_view view_of(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

void copy(const nb::bytes& from, std::span<std::byte> to) {
  if (from.size() != to.size()) throw nb::value_error("another number of bytes has come");
  if (!to.empty()) std::memcpy(to.data(), from.c_str(), to.size());
}

}  // namespace

engine::Collectives::Started PyRanks::all_to_all(Channel, std::span<const std::byte>,
                                                 std::span<const uint64_t>, std::span<std::byte>,
                                                 std::span<const uint64_t>) {
  return Status(ErrorCode::kUnsupported, "an exchange of gradients by the core");
}

engine::Collectives::Started PyRanks::broadcast(Channel channel, std::span<std::byte> bytes,
                                                uint32_t root) {
  return with_gil([&] {
    const nb::object sent = rank_ == root ? nb::object(bytes_of(bytes)) : nb::none();
    copy(nb::cast<nb::bytes>(
             calls_.attr("broadcast")(static_cast<int>(channel), sent, bytes.size(), root)),
         bytes);
  });
}

engine::Collectives::Started PyRanks::all_gather(Channel channel, std::span<const std::byte> mine,
                                                 std::span<std::byte> all) {
  return with_gil([&] {
    const auto parts =
        nb::cast<nb::list>(calls_.attr("all_gather")(static_cast<int>(channel), bytes_of(mine)));
    for (size_t rank = 0; rank < world_; ++rank) {
      copy(nb::cast<nb::bytes>(parts[rank]), all.subspan(rank * mine.size(), mine.size()));
    }
  });
}

Status PyRanks::barrier(Channel channel) {
  std::byte mine{};
  std::vector<std::byte> all(world_);
  return engine::all_gather(*this, channel, {&mine, 1}, all);
}

void PyRanks::failed(const Status& why) {
  (void)with_gil([&] { calls_.attr("failed")(why.to_string()); });
}

nb::list PyRanks::all_texts(const nb::bytes& mine) {
  nb::list texts;
  for (const std::string& text :
       take(engine::all_gather(*this, Channel::kControl, view_of(mine)))) {
    texts.append(nb::bytes(text.data(), text.size()));
  }
  return texts;
}

nb::bytes PyRanks::first_text(const nb::bytes& mine) {
  std::string text(view_of(mine));
  check(engine::broadcast(*this, Channel::kControl, text, 0));
  return nb::bytes(text.data(), text.size());
}

void PyRanks::all_ok(const std::string& call, const nb::object& failure) {
  check(engine::all_ok(*this, Channel::kControl, call,
                       failure.is_none() ? Status() : status_of(failure)));
}

}  // namespace smartinf::python
