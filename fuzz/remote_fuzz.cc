// Any bytes as what a client or a server sends: a message that is the same when it is sent again,
// or a typed error; and any commands of a client at a server's gate. Input: one byte of choices,
// then the head of a frame without its length and checksum.
#include <cstring>
#include <memory>
#include <vector>

#include "smartinf/base/check.h"
#include "smartinf/serve/command_gate.h"
#include "smartinf/serve/protocol_fields.h"
#include "smartinf/serve/stream.h"

namespace smartinf::serve::wire {
namespace {

InFrame frame_of(std::vector<std::byte> bytes) {
  auto held = std::make_shared<std::vector<std::byte>>(std::move(bytes));
  std::vector<std::span<const std::byte>> pieces{*held};
  auto frame = InFrame::split(std::move(pieces), std::move(held));
  SI_CHECK(frame.ok(), "a frame that was just made");
  return std::move(*frame);
}

template <typename Message>
base::Result<Message> parse(const std::vector<std::byte>& head) {
  auto message = decode<Message>(frame_of(seal_head(head)));
  if (message.ok()) {
    SI_CHECK(decode<Message>(frame_of(encode(*message))).ok(), "what was sent again");
  }
  return message;
}

storage::StoreLayout gate_layout() {
  storage::StoreLayout layout;
  layout.planes = {base::PlaneKind::kMaster, base::PlaneKind::kMomentum,
                   base::PlaneKind::kVariance};
  for (uint32_t i = 0; i < 4; ++i) {
    layout.subgroups.push_back({base::SubgroupId{i}, i * base::kBlockElements, 1000});
  }
  return layout;
}

/// Bytes that a server takes for a message, but for a compressed gradient, whose frame says how
/// long it is.
struct Bytes {
  uint64_t all = 0;
  void down(const void* memory, uint64_t bytes) { all += memory != nullptr ? bytes : 0; }
  void down(std::span<const std::byte>) {}
  void up(const void* memory, uint64_t bytes, base::SubgroupId) { down(memory, bytes); }
  void up(std::span<std::byte> memory, base::SubgroupId) { all += memory.size(); }
  void samples(const base::Bf16*, base::SubgroupId) {}
};

void at_the_gate(const Up& up) {
  static const csd::DeviceSpace space(
      gate_layout(), {.groups = {{0, 4 * base::kBlockElements, 0}}, .matrices = {}}, 0);
  const auto* command = std::get_if<CommandFrame>(&up.body);
  if (command == nullptr) return;
  storage::StoreState state;
  state.initialized = true;
  CommandGate gate(true);
  if (const auto* message = std::get_if<csd::Message>(&command->body)) {
    csd::Message sized = *message;
    const bool right =
        std::visit([&](const auto& one) { return csd::check(one, space).ok(); }, sized);
    if (!right) return;
    Bytes bytes;
    std::visit([&](auto& one) { csd::memory(bytes, one, space); }, sized);
    SI_CHECK(bytes.all <= 4000 * 4 * 4, "memory beyond the device");
    if (gate.admit(command->body, space, state).ok()) gate.finished(*message);
  } else {
    (void)gate.admit(command->body, space, state);
  }
}

}  // namespace
}  // namespace smartinf::serve::wire

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace smartinf::serve::wire;
  if (size == 0) return 0;
  const auto* bytes = reinterpret_cast<const std::byte*>(data);
  const std::vector<std::byte> head(bytes + 1, bytes + size);
  (void)InFrame::split({head}, nullptr);
  switch (data[0] % 10) {
    case 0:
      (void)parse<Hello>(head);
      break;
    case 1:
      (void)parse<Ask>(head);
      break;
    case 2:
      (void)parse<Answer>(head);
      break;
    case 3:
      if (const auto attach = parse<Attach>(head); attach.ok() && attach->create) {
        const auto fits = check_layout(*attach->create, attach->wishes.durability,
                                       attach->share.spool_bytes, uint64_t{1} << 30);
        if (fits.ok()) (void)check_share(*attach->create, attach->share);
      }
      break;
    case 4:
      (void)parse<Attached>(head);
      break;
    case 5:
      (void)parse<Down>(head);
      break;
    case 6:
      (void)parse<SnapshotAsk>(head);
      break;
    case 7:
      (void)parse<StateAsk>(head);
      break;
    case 8:
      (void)parse<CreateState>(head);
      break;
    default:
      if (const auto up = parse<Up>(head); up.ok()) at_the_gate(*up);
      break;
  }
  return 0;
}
