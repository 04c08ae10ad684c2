#include "smartinf/sim/template.h"

#include <gtest/gtest.h>

namespace smartinf::sim {
namespace {

TEST(Template, ValuesAreEscapedAndSectionsRepeated) {
  const nlohmann::json values{{"name", "a<b> & \"c\""},
                              {"count", 3},
                              {"yes", true},
                              {"no", false},
                              {"rows", {{{"x", "1"}}, {{"x", "2"}, {"name", "inner"}}}},
                              {"none", nlohmann::json::array()}};
  EXPECT_EQ(fill_template("{{name}} {{count}}", values), "a&lt;b&gt; &amp; &quot;c&quot; 3");
  EXPECT_EQ(fill_template("{{#yes}}y{{/yes}}{{#no}}n{{/no}}{{^no}}m{{/no}}", values), "ym");
  EXPECT_EQ(fill_template("[{{#rows}}{{x}}{{count}},{{/rows}}]", values), "[13,23,]");
  EXPECT_EQ(fill_template("{{#rows}}{{#yes}}{{x}}{{/yes}}{{/rows}}", values), "12");
  EXPECT_EQ(fill_template("{{#none}}{{nothing}}{{/none}}.", values), ".");
  EXPECT_EQ(fill_template("no tags } { }}", values), "no tags } { }}");
}

TEST(TemplateDeathTest, WhatIsNotKnownIsABug) {
  EXPECT_DEATH(fill_template("{{nothing}}", nlohmann::json::object()), "not given");
  EXPECT_DEATH(fill_template("{{#a}}", {{"a", true}}), "without an end");
}

}  // namespace
}  // namespace smartinf::sim
