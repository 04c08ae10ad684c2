#include "smartinf/base/unified_memory.h"

#include <cstdlib>

#include <gtest/gtest.h>

namespace smartinf::base {
namespace {

TEST(UnifiedMemory, TheEnvironmentDecides) {
  ::setenv("SMARTINF_UNIFIED_MEMORY", "yes", 1);
  EXPECT_TRUE(memory_is_unified());
  ::setenv("SMARTINF_UNIFIED_MEMORY", "no", 1);
  EXPECT_FALSE(memory_is_unified());
  ::unsetenv("SMARTINF_UNIFIED_MEMORY");
  const bool of_driver = memory_is_unified();
  ::setenv("SMARTINF_UNIFIED_MEMORY", "maybe", 1);
  EXPECT_EQ(memory_is_unified(), of_driver);
  ::unsetenv("SMARTINF_UNIFIED_MEMORY");
}

}  // namespace
}  // namespace smartinf::base
