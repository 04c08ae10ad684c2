// The table of docs/devices.md: what a device answers to each message in each state of a step. With
// SMARTINF_WRITE_TABLE=1 the test writes it in place of comparing.
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "tests/device_contract/contract.h"

namespace smartinf::csd {
namespace {

constexpr std::string_view kBegin = "<!-- messages by state: begin -->\n";
constexpr std::string_view kEnd = "<!-- messages by state: end -->\n";
constexpr std::array<std::string_view, 6> kStates = {"new",          "between steps", "begun",
                                                     "gradients in", "updated",       "prepared"};

/// A device of two subgroups in memory, led to a state; every message is tried on a new one.
class Fresh {
 public:
  explicit Fresh(size_t state) : layout_(test_layout(StateFormat::kF32, 0, 2)) {
    const storage::StoredSubgroup& last = layout_.subgroups.back();
    options_.name = "drive-a";
    options_.slots = 3;
    options_.weight_read_slots = 1;
    options_.threads = 1;
    options_.groups = test_groups(last.first_element + last.count);
    options_.store.spool_bytes = base::kMiB;
    drive_ = std::move(*EmulatedDrive::create(
        *EmulatedDrive::size_for(layout_, storage::Durability::kStep, base::kMiB)));
    device_ = std::move(*create_emulated_device(options_, layout_, *drive_));
    driver_.drive(*device_);
    if (state == 0) return;
    SI_CHECK(driver_.make_start(layout_).ok(), "the first state");
    if (state >= 2) SI_CHECK(driver_.run(BeginStep{1}).ok(), "begin");
    if (state >= 3) SI_CHECK(driver_.put_all(layout_, 1).ok(), "gradients");
    if (state >= 4) SI_CHECK(driver_.update(layout_, 1).ok(), "update");
    if (state >= 5) SI_CHECK(driver_.prepare(1).ok(), "prepare");
  }
  const storage::StoredSubgroup& first() const { return layout_.subgroups.front(); }
  Update update(plan::UpdateMode mode) const {
    Update update;
    update.mode = mode;
    update.scalars = test_scalars(1);
    for (const auto& subgroup : layout_.subgroups) update.updates.push_back({subgroup.id});
    return update;
  }
  std::string answer(Message message) {
    const Status status = driver_.run(std::move(message));
    if (status.ok()) return "done";
    switch (status.code()) {
      case base::ErrorCode::kFailedPrecondition:
        return "refused";
      case base::ErrorCode::kInvalidArgument:
        return "refused: elements that came already";
      default:
        return status.to_string();
    }
  }

 private:
  storage::StoreLayout layout_;
  LocalDeviceOptions options_;
  std::unique_ptr<EmulatedDrive> drive_;
  std::unique_ptr<Device> device_;
  DeviceDriver driver_;
};

struct Row {
  std::string name;
  std::function<Message(Fresh&)> message;
};

/// Every message; those of a step are of step 1. Memory lives as long as the rows.
std::vector<Row> rows(std::vector<std::byte>& memory, std::span<std::byte> spooled) {
  auto* floats = reinterpret_cast<float*>(memory.data());
  return {
      {"begin step", [](Fresh&) { return BeginStep{1}; }},
      {"prefetch", [](Fresh& f) { return Prefetch{{f.first().id}}; }},
      {"put gradient",
       [&](Fresh& f) {
         return PutGradient{f.first().id, 0, 100, DataType::kBf16, memory.data()};
       }},
      {"update, in order", [](Fresh& f) { return f.update(plan::UpdateMode::kInOrder); }},
      {"update, the rest", [](Fresh& f) { return f.update(plan::UpdateMode::kRest); }},
      {"stop update", [](Fresh&) { return StopUpdate{}; }},
      {"finish update", [](Fresh&) { return FinishUpdate{}; }},
      {"read state",
       [floats](Fresh& f) {
         return ReadState{f.first().id, 0, f.first().count, {floats}};
       }},
      {"write state",
       [floats](Fresh& f) {
         return WriteState{f.first().id, f.first().count, {floats}};
       }},
      {"prepare",
       [](Fresh&) {
         return Prepare{1, "x"};
       }},
      {"commit", [](Fresh&) { return Commit{1}; }},
      {"abort", [](Fresh&) { return Abort{1}; }},
      {"flush", [](Fresh&) { return Flush{}; }},
      {"read weights, committed",
       [&](Fresh& f) {
         return ReadWeights{f.first().id, 0, DataType::kF32, memory.data()};
       }},
      {"put spool",
       [spooled](Fresh&) {
         return PutSpool{0, spooled};
       }},
      {"get spool, not put",
       [spooled](Fresh&) {
         return GetSpool{0, spooled};
       }},
  };
}

std::string table() {
  std::vector<std::byte> memory(2 * base::kBlockElements * sizeof(float));
  const auto spooled = std::move(*base::AlignedBuffer::allocate(base::kIoAlignment));
  std::ostringstream out;
  out << "| message |";
  for (const std::string_view state : kStates) out << " " << state << " |";
  out << "\n|---|";
  for (size_t i = 0; i < kStates.size(); ++i) out << "---|";
  out << "\n";
  for (const Row& row : rows(memory, const_cast<base::AlignedBuffer&>(spooled).bytes())) {
    out << "| " << row.name << " |";
    for (size_t state = 0; state < kStates.size(); ++state) {
      Fresh fresh(state);
      out << " " << fresh.answer(row.message(fresh)) << " |";
    }
    out << "\n";
  }
  return out.str();
}

TEST(DeviceTable, DocsSayWhatADeviceAnswersInEachStateOfAStep) {
  std::ifstream in(SMARTINF_DEVICES_PAGE);
  std::string page((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  const size_t begin = page.find(kBegin);
  const size_t end = page.find(kEnd);
  ASSERT_TRUE(begin != std::string::npos && end != std::string::npos);
  const size_t first = begin + kBegin.size();
  const std::string made = table();
  if (std::getenv("SMARTINF_WRITE_TABLE") != nullptr) {
    std::ofstream(SMARTINF_DEVICES_PAGE) << page.replace(first, end - first, made);
    return;
  }
  EXPECT_EQ(page.substr(first, end - first), made)
      << "SMARTINF_WRITE_TABLE=1 device_contract_tests --gtest_filter='DeviceTable*' writes it";
}

}  // namespace
}  // namespace smartinf::csd
