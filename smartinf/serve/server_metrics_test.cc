#include "smartinf/serve/server_metrics.h"

#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace smartinf::serve {
namespace {

using testing::HasSubstr;
using testing::Not;

TEST(MetricsText, IsPrometheusForm) {
  MetricsText text;
  text.family("a_total", "counter", "Back\\slash\nand line");
  text.sample(std::numeric_limits<uint64_t>::max(), {{"device", "a\"b\\c\nd"}, {"kind", "x"}});
  text.family("b", "gauge", "B.");
  text.sample(0.25);
  text.sample(std::numeric_limits<double>::infinity(), {{"k", "v"}});
  EXPECT_EQ(text.text(),
            "# HELP a_total Back\\\\slash\\nand line\n# TYPE a_total counter\n"
            "a_total{device=\"a\\\"b\\\\c\\nd\",kind=\"x\"} 18446744073709551615\n"
            "# HELP b B.\n# TYPE b gauge\nb 0.25\nb{k=\"v\"} +Inf\n");
}

TEST(MetricsText, ServersHaveEachFamilyOnce) {
  ServerMetrics metrics;
  metrics.version = "1";
  metrics.refused = 2;
  metrics.devices.resize(2);
  metrics.devices[0].name = "fast0";
  metrics.devices[0].holder = "gpu1";
  metrics.devices[0].received_bytes = 4096;
  metrics.devices[0].steps_committed = 3;
  metrics.devices[1].name = "slow0";
  metrics.devices[1].temperature_celsius = 41.5;
  const std::string text = metrics_text(metrics);
  EXPECT_THAT(text, HasSubstr("smartinf_device_client{device=\"fast0\",client=\"gpu1\"} 0\n"));
  EXPECT_THAT(text, Not(HasSubstr("smartinf_device_client{device=\"slow0\"")));
  EXPECT_THAT(text, HasSubstr("smartinf_device_received_bytes_total{device=\"fast0\"} 4096\n"));
  EXPECT_THAT(text, HasSubstr("smartinf_device_steps_committed_total{device=\"fast0\"} 3\n"));
  EXPECT_THAT(text, HasSubstr("smartinf_device_temperature_celsius{device=\"slow0\"} 41.5\n"));
  EXPECT_THAT(text, HasSubstr("\nsmartinf_refused_total 2\n"));
  EXPECT_THAT(text, Not(HasSubstr("wear")));  // no device knows it
  for (size_t at = text.find("# TYPE "); at != std::string::npos;
       at = text.find("# TYPE ", at + 1)) {
    const std::string line = text.substr(at, text.find('\n', at) - at);
    EXPECT_EQ(text.find(line + "\n"), text.rfind(line + "\n")) << line;
  }
}

}  // namespace
}  // namespace smartinf::serve
