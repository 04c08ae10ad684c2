#include "python/core/ranks.h"

#include <cstring>
#include <exception>
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
  std::string text = nb::cast<std::string>(nb::str(error));
  if (!nb::isinstance(error, nb::module_::import_("smartinf.errors").attr("Error"))) {
    // Many of Python's own are hard to understand without their class, or have no text at all.
    return Status(ErrorCode::kIo,
                  nb::cast<std::string>(nb::inst_name(error)) + (text.empty() ? "" : ": ") + text);
  }
  const std::string code = nb::cast<std::string>(error.attr("code"));
  const std::string advice = nb::cast<std::string>(error.attr("advice"));
  // A text that the core has made ends with its advice, which is added again.
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

/// call() with the GIL. Nothing that it raises leaves here, because the engine lies in between:
/// what is no Exception (KeyboardInterrupt) is left in `interrupt` as well.
template <typename Call>
engine::Collectives::Started with_gil(std::exception_ptr& interrupt, const Call& call) {
  const nb::gil_scoped_acquire acquired;
  try {
    try {
      call();
    } catch (nb::python_error& error) {
      if (!error.matches(PyExc_Exception)) interrupt = std::current_exception();
      return status_of(error.value());
    }
  } catch (const std::exception& error) {  // also of an error that has no text
    return Status(ErrorCode::kIo, error.what());
  }
  return std::unique_ptr<engine::Collectives::Pending>(std::make_unique<Ended>());
}

nb::bytes bytes_of(std::span<const std::byte> bytes) {
  return nb::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

void copy(const nb::object& from, std::span<std::byte> to) {
  if (!nb::isinstance<nb::bytes>(from)) throw nb::type_error("something else than bytes has come");
  const auto bytes = nb::borrow<nb::bytes>(from);
  if (bytes.size() != to.size()) throw nb::value_error("another number of bytes has come");
  if (!to.empty()) std::memcpy(to.data(), bytes.c_str(), to.size());
}

}  // namespace

engine::Collectives::Started PyRanks::all_to_all(Channel channel, std::span<const std::byte> send,
                                                 std::span<const uint64_t> send_bytes,
                                                 std::span<std::byte> receive,
                                                 std::span<const uint64_t> receive_bytes) {
  return with_gil(interrupt_, [&] {
    nb::list sent, sizes;
    for (size_t rank = 0; rank < world_; ++rank) {
      sent.append(bytes_of(send.first(send_bytes[rank])));
      send = send.subspan(send_bytes[rank]);
      sizes.append(receive_bytes[rank]);
    }
    const nb::object parts = calls_.attr("all_to_all")(static_cast<int>(channel), sent, sizes);
    for (size_t rank = 0; rank < world_; ++rank) {
      copy(parts[rank], receive.first(receive_bytes[rank]));
      receive = receive.subspan(receive_bytes[rank]);
    }
  });
}

engine::Collectives::Started PyRanks::broadcast(Channel, std::span<std::byte>, uint32_t) {
  return Status(ErrorCode::kUnsupported, "an exchange of weights by the core");
}

engine::Collectives::Started PyRanks::all_gather(Channel channel, std::span<const std::byte> mine,
                                                 std::span<std::byte> all) {
  return with_gil(interrupt_, [&] {
    const nb::object parts = calls_.attr("all_gather")(static_cast<int>(channel), bytes_of(mine));
    for (size_t rank = 0; rank < world_; ++rank) {
      copy(parts[rank], all.subspan(rank * mine.size(), mine.size()));
    }
  });
}

Status PyRanks::barrier(Channel channel) {
  std::byte mine{};
  std::vector<std::byte> all(world_);
  return engine::all_gather(*this, channel, {&mine, 1}, all);
}

void PyRanks::failed(const Status& why) {
  std::exception_ptr interrupt;
  (void)with_gil(interrupt, [&] { calls_.attr("failed")(why.to_string()); });
}

void PyRanks::raise_interrupt() {
  if (interrupt_) std::rethrow_exception(std::exchange(interrupt_, nullptr));
}

void PyRanks::all_ok(const std::string& call, const nb::object& failure) {
  Status all = engine::all_ok(*this, Channel::kControl, call,
                              failure.is_none() ? Status() : status_of(failure));
  raise_interrupt();
  check(std::move(all));
}

}  // namespace smartinf::python
