#include <cstdlib>
#include <string>

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "smartinf/kernels/update.h"

namespace smartinf::kernels {
namespace {

TEST(Tables, ScalarIsFirstAndNamesAreFoundInAnyCase) {
  const std::vector<const KernelTable*> tables = supported_tables();
  ASSERT_FALSE(tables.empty());
  EXPECT_EQ(tables.front()->isa(), "scalar");
  for (const KernelTable* table : tables) {
    std::string name(table->isa());
    EXPECT_EQ(find_table(name).value(), table);
    for (char& c : name) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    EXPECT_EQ(find_table(name).value(), table);
  }
}

TEST(Tables, AnUnknownNameIsToldWhatThereIs) {
  const base::Result<const KernelTable*> found = find_table("AVX9");
  ASSERT_FALSE(found.ok());
  EXPECT_EQ(found.status().code(), base::ErrorCode::kUnsupported);
  EXPECT_NE(found.status().to_string().find("AVX9"), std::string::npos);
  EXPECT_NE(found.status().to_string().find("scalar"), std::string::npos);
}

// The pin is read once per process, so it is tried in processes of its own: this program again,
// with the one case below. Exit code 0 means that kernels() is the table asked for.
constexpr const char* kExpectedIsa = "SMARTINF_TEST_EXPECTED_ISA";

TEST(Pin, DISABLED_Child) {
  const char* expected = std::getenv(kExpectedIsa);
  ASSERT_NE(expected, nullptr);
  const bool honoured = expected[0] != '!';
  EXPECT_EQ(kernels().isa(), honoured ? expected : expected + 1);
  EXPECT_EQ(forced_isa_status().ok(), honoured);
}

int run_pinned(const std::string& forced, const std::string& expected) {
  const pid_t child = fork();
  if (child == 0) {
    setenv("SMARTINF_FORCE_ISA", forced.c_str(), 1);
    setenv(kExpectedIsa, expected.c_str(), 1);
    execl("/proc/self/exe", "kernels_tests", "--gtest_filter=Pin.DISABLED_Child",
          "--gtest_also_run_disabled_tests", "--gtest_brief=1", nullptr);
    _exit(127);
  }
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status)) return -1;
  return WEXITSTATUS(status);
}

TEST(Pin, TakesEveryTableOfThisMachine) {
  for (const KernelTable* table : supported_tables()) {
    const std::string isa(table->isa());
    EXPECT_EQ(run_pinned(isa, isa), 0) << isa;
  }
  EXPECT_EQ(run_pinned("", std::string(supported_tables().back()->isa())), 0);
  // The child tells a wrong answer from a right one.
  EXPECT_NE(run_pinned("scalar", "AVX2"), 0);
}

TEST(Pin, FallsBackToScalarAndSaysSo) { EXPECT_EQ(run_pinned("AVX9", "!scalar"), 0); }

}  // namespace
}  // namespace smartinf::kernels
