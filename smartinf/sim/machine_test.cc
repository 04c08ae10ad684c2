#include "smartinf/sim/machine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace smartinf::sim {
namespace {

using testing::HasSubstr;

constexpr std::string_view kSmall = R"(
name = "small"
[gpu]
preset = "A5000"
[host]
memory_bytes = "64GB"
link_bytes_per_s = 1e10
update_bytes_per_s = 2e10
copy_bytes_per_s = 1e10
[[device]]
count = 2
read_bytes_per_s = 3e9
write_bytes_per_s = 2e9
link_bytes_per_s = 3e9
update_bytes_per_s = 8e9
)";

std::string with(std::string_view from, std::string_view to) {
  std::string text(kSmall);
  text.replace(text.find(from), from.size(), to);
  return text;
}
std::string failure(const std::string& text) {
  const auto machine = parse_machine(text, "small.toml");
  EXPECT_FALSE(machine.ok());
  return machine.ok() ? "" : machine.status().to_string();
}

TEST(Machine, EveryShippedFileIsValidAndNamedAsItsFile) {
  const auto names = machine_preset_names();
  ASSERT_GE(names.size(), 8u);
  for (const std::string_view name : names) {
    const auto machine = load_machine(name);
    ASSERT_TRUE(machine.ok()) << machine.status().to_string();
    EXPECT_EQ(machine->name, name);
  }
}

TEST(Machine, WritesWhatItReads) {
  for (const std::string_view name : machine_preset_names()) {
    const auto machine = load_machine(name);
    ASSERT_TRUE(machine.ok());
    const std::string text = machine_to_toml(*machine);
    const auto again = parse_machine(text, "again");
    ASSERT_TRUE(again.ok()) << again.status().to_string() << text;
    EXPECT_EQ(machine_to_toml(*again), text);
  }
}

TEST(Machine, NamesTheKeyAndTheNearestOne) {
  EXPECT_THAT(failure(with("read_bytes_per_s", "read_byte_per_s")),
              HasSubstr("small.toml:12:1: unknown key 'device.read_byte_per_s'; did you mean "
                        "read_bytes_per_s?"));
  EXPECT_THAT(failure(with("[host]", "[hosts]")), HasSubstr("did you mean host?"));
  EXPECT_THAT(failure(with("3e9", "-3e9")), HasSubstr("above zero"));
  EXPECT_THAT(failure(with("3e9", "nan")), HasSubstr("expected a number above zero, found"));
  EXPECT_THAT(failure(with("3e9", "inf")), HasSubstr("expected a number above zero, found"));
  EXPECT_THAT(failure(with("count = 2", "count = 0")), HasSubstr("above zero"));
  EXPECT_THAT(failure(with("count = 2", "count = 1.5")), HasSubstr("whole"));
  EXPECT_THAT(failure(with("count = 2", "count = \"two\"")), HasSubstr("found the text \"two\""));
  EXPECT_THAT(failure(with("A5000", "A50000")), HasSubstr("Did you mean A5000"));
  EXPECT_THAT(failure(with("count = 2", "mixed_efficiency = 1.2")), HasSubstr("at most 1"));
  EXPECT_THAT(failure(with("count = 2", "count = ")), HasSubstr("small.toml:"));
  EXPECT_THAT(failure(with("link_bytes_per_s = 1e10", "")), HasSubstr("link_bytes_per_s"));
}

TEST(Machine, NamesTheNearestMachineAndTheMissingFile) {
  EXPECT_THAT(load_machine("smartssd-a50000").status().to_string(), HasSubstr("smartssd-a5000"));
  EXPECT_THAT(load_machine("/nowhere/x.toml").status().to_string(), HasSubstr("/nowhere/x.toml"));
}

}  // namespace
}  // namespace smartinf::sim
