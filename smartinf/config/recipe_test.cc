#include "smartinf/config/recipe.h"

#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "smartinf/base/test_scratch.h"
#include "smartinf/config/keys.h"

namespace smartinf::config {
namespace {

using base::ErrorCode;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

LoadedRecipe good(std::string_view text, std::vector<Override> overrides = {}) {
  base::Result<LoadedRecipe> loaded = parse_recipe(text, "some/name.toml", overrides);
  EXPECT_TRUE(loaded.ok()) << (loaded.ok() ? "" : loaded.status().to_string());
  return loaded.ok() ? std::move(loaded).value() : LoadedRecipe{};
}

std::string bad(std::string_view text, std::vector<Override> overrides = {}) {
  const base::Result<LoadedRecipe> loaded = parse_recipe(text, "some/name.toml", overrides);
  EXPECT_FALSE(loaded.ok()) << "was accepted: " << text;
  return loaded.ok() ? "" : loaded.status().to_string();
}

std::string read(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

TEST(Recipe, ReadsEveryTypeOfValue) {
  const LoadedRecipe loaded = good(R"(
[model]
layers = 3
tied_head = false
[data]
paths = ["a.txt", "b"]
[train]
lr = 0.5
steps = 12
run = "runs/x"
precision = "f32"
[optimizer]
where = "host"
format = "q8"
[engine]
memory_budget = "64MiB"
[[device]]
path = "/mnt/a"
[[device]]
path = "/mnt/b"
bandwidth = 2
)");
  const Recipe& recipe = loaded.recipe;
  EXPECT_EQ(recipe.options.model.layers, 3u);
  EXPECT_FALSE(recipe.options.model.tied_head);
  EXPECT_THAT(recipe.options.data.paths, testing::ElementsAre("a.txt", "b"));
  EXPECT_EQ(recipe.options.train.lr, 0.5);
  EXPECT_EQ(recipe.options.train.steps, 12u);
  EXPECT_EQ(recipe.options.train.run, "runs/x");
  EXPECT_EQ(recipe.options.train.precision, train::Precision::kF32);
  EXPECT_EQ(recipe.options.train.where, train::OptimizerWhere::kHost);
  EXPECT_EQ(recipe.updater.where, engine::UpdateWhere::kHost);
  EXPECT_EQ(recipe.updater.format, base::StateFormat::kQ8);
  EXPECT_EQ(recipe.updater.memory_budget_bytes, uint64_t{64} << 20);
  ASSERT_EQ(recipe.updater.devices.size(), 2u);
  EXPECT_EQ(recipe.updater.devices[1].path, "/mnt/b");
  EXPECT_EQ(recipe.updater.devices[1].bandwidth, 2.0);
}

TEST(Recipe, ABandwidthIsANumberOrASize) {
  const LoadedRecipe loaded = good(
      "[[device]]\npath = \"a\"\nbandwidth = \"1GB\"\n[[device]]\npath = \"b\"\nbandwidth = 0.5\n"
      "[[device]]\npath = \"c\"\nbandwidth = 2\n",
      {{"device.3.path", "d"},
       {"device.4.path", "e"},
       {"device.5.path", "f"},
       {"device.3.bandwidth", "0.5"},
       {"device.4.bandwidth", "3GB"},
       {"device.5.bandwidth", "1e9"}});
  std::vector<double> read;
  for (const auto& device : loaded.recipe.updater.devices) read.push_back(device.bandwidth);
  EXPECT_THAT(read, testing::ElementsAre(1e9, 0.5, 2, 0.5, 3e9, 1e9));
  EXPECT_THAT(bad("[[device]]\nbandwidth = \"fast\"\n"), HasSubstr("such as 2 or \"3GB\""));
}

TEST(Recipe, FlagWinsOverFileAndFileOverDefault) {
  const LoadedRecipe loaded =
      good("[train]\nsteps = 5\nlr = 0.25\n", {{"train.steps", "7"}, {"model.width", "64"}});
  EXPECT_EQ(loaded.recipe.options.train.steps, 7u);
  EXPECT_EQ(loaded.recipe.options.train.lr, 0.25);
  EXPECT_EQ(loaded.recipe.options.model.width, 64u);
  EXPECT_EQ(loaded.origins.at("train.steps").kind, Origin::Kind::kFlag);
  EXPECT_EQ(loaded.origins.at("train.lr").kind, Origin::Kind::kFile);
  EXPECT_EQ(loaded.origins.at("train.lr").line, 3u);
  EXPECT_FALSE(loaded.origins.contains("train.seed"));
}

TEST(Recipe, LinksOfDevicesAndOfTheHost) {
  std::vector<std::string> words = {"--device.0.internal_shared", "--device.0.internal_latency_us",
                                    "50"};
  const auto flags = take_overrides(words);
  ASSERT_TRUE(flags.ok()) << flags.status().to_string();
  EXPECT_TRUE(words.empty());
  const Recipe recipe = good(R"(
[engine]
host_link_up = "160MB"
host_link_down = "80MB"
host_link_shared = true
[[device]]
path = "a"
internal_read = "75MB"
internal_write = "40MB"
)",
                             *flags)
                            .recipe;
  const engine::EmulatedLink& host = recipe.updater.host_link;
  EXPECT_EQ(host.up_bytes_per_s, 160'000'000u);
  EXPECT_EQ(host.down_bytes_per_s, 80'000'000u);
  EXPECT_TRUE(host.shared_budget);
  const engine::EmulatedLink& internal = recipe.updater.devices[0].internal_link;
  EXPECT_EQ(internal.up_bytes_per_s, 75'000'000u);
  EXPECT_EQ(internal.down_bytes_per_s, 40'000'000u);
  EXPECT_TRUE(internal.shared_budget);
  EXPECT_EQ(internal.latency_us, 50u);
  EXPECT_THAT(bad("[engine]\nhost_link_latency_us = 2000000\n"),
              HasSubstr("engine.host_link_latency_us is 2000000"));
}

TEST(Recipe, FillsInWhatFollows) {
  const LoadedRecipe loaded = good("");
  EXPECT_EQ(loaded.recipe.options.train.run, "runs/name");
  ASSERT_EQ(loaded.recipe.updater.devices.size(), 1u);
  EXPECT_EQ(loaded.recipe.updater.devices[0].path, "runs/name/state");
  EXPECT_EQ(loaded.recipe.updater.gradient_type, base::DataType::kBf16);
  EXPECT_EQ(good("train.precision = \"f32\"").recipe.updater.gradient_type, base::DataType::kF32);
  EXPECT_EQ(good("train.precision = \"f32\"\noptimizer.gradient_type = \"bf16\"")
                .recipe.updater.gradient_type,
            base::DataType::kBf16);
}

TEST(Recipe, UnknownKeysNameLineAndNearestKey) {
  const std::string text = bad("[train]\nlr = 1\nstpes = 5\n");
  EXPECT_THAT(text, HasSubstr("some/name.toml:3:1"));
  EXPECT_THAT(text, HasSubstr("train.stpes"));
  EXPECT_THAT(text, HasSubstr("did you mean train.steps?"));
  EXPECT_THAT(bad("[trian]\nsteps = 1\n"), HasSubstr("did you mean [train]?"));
  EXPECT_THAT(bad("[[devices]]\npath = 'a'\n"), HasSubstr("devices"));
  EXPECT_THAT(bad("steps = 1\n"), HasSubstr("did you mean train.steps?"));
  EXPECT_THAT(bad("train = 1\n"), HasSubstr("write [train]"));
  EXPECT_THAT(bad("[device]\npath = 'a'\n"), HasSubstr("[[device]]"));
  EXPECT_THAT(bad("[[device]]\npath = 'a'\npaht = 'b'\n"), HasSubstr("device.path"));
  EXPECT_THAT(bad("", {{"train.stpes", "5"}}), HasSubstr("did you mean train.steps?"));
}

TEST(Recipe, WrongTypesSayWhatWasExpectedAndFound) {
  const std::string text = bad("[train]\nsteps = \"many\"\n");
  EXPECT_THAT(text, HasSubstr("some/name.toml:2:9"));
  EXPECT_THAT(text, HasSubstr("expected a whole number"));
  EXPECT_THAT(text, HasSubstr("found the text \"many\""));
  EXPECT_THAT(bad("[train]\nsteps = 1.5\n"), HasSubstr("found the number 1.5"));
  EXPECT_THAT(bad("[train]\nsteps = -1\n"), HasSubstr("found the whole number -1"));
  EXPECT_THAT(bad("[model]\nlayers = 5000000000\n"),
              HasSubstr("expected a whole number from 0 to"));
  EXPECT_THAT(bad("[train]\nlr = nan\n"), HasSubstr("expected a number"));
  EXPECT_THAT(bad("[train]\nlr = inf\n"), HasSubstr("expected a number"));
  EXPECT_THAT(bad("[model]\ntied_head = 1\n"), HasSubstr("expected true or false"));
  EXPECT_THAT(bad("[data]\npaths = \"a\"\n"), HasSubstr("expected a list of texts"));
  EXPECT_THAT(bad("[data]\npaths = [1]\n"), HasSubstr("expected a list of texts"));
  EXPECT_THAT(bad("[engine]\nmemory_budget = \"lots\"\n"), HasSubstr("expected a size"));
  EXPECT_THAT(bad("[optimizer]\nformat = \"fp8\"\n"),
              HasSubstr("one of \"f32\", \"bf16\", \"q8\""));
  EXPECT_THAT(bad("[train.steps]\na = 1\n"), HasSubstr("found a table"));
  EXPECT_THAT(bad("[train]\nsteps = 1979-05-27\n"), HasSubstr("found a date or time"));
  EXPECT_THAT(bad("", {{"train.steps", "1e3"}}),
              HasSubstr("--train.steps: expected a whole number"));
  EXPECT_THAT(bad("", {{"train.lr", "0.1x"}}), HasSubstr("--train.lr: expected a number"));
}

TEST(Recipe, SyntaxErrorsNameTheLine) {
  EXPECT_THAT(bad("[train]\nsteps = \n"), HasSubstr("some/name.toml:2:"));
  EXPECT_THAT(bad("[train]\nsteps = 1\nsteps = 2\n"), HasSubstr("some/name.toml:3:"));
}

TEST(Recipe, LettersOutsideOfStringsAreSyntaxErrors) {
  EXPECT_THAT(bad("[train]\nlr = \u00e9-3\n"), HasSubstr("some/name.toml:2"));
  EXPECT_THAT(bad("[train]\nlr \u0401 = 1\n"), HasSubstr("some/name.toml:2"));
}

TEST(Recipe, ReportsAllProblemsAtOnceUpToABound) {
  const std::string text = bad("[train]\nstpes = 5\nlr = \"x\"\n", {{"model.with", "3"}});
  EXPECT_THAT(text, HasSubstr("stpes"));
  EXPECT_THAT(text, HasSubstr("train.lr: expected"));
  EXPECT_THAT(text, HasSubstr("model.width"));
  std::string many = "[train]\n";
  for (int i = 0; i < 50; ++i) many += "x" + std::to_string(i) + " = 1\n";
  EXPECT_THAT(bad(many), HasSubstr("and 40 more"));
}

TEST(Recipe, RangesAreCheckedAndNameTheirOrigin) {
  EXPECT_THAT(bad("[optimizer]\neps = 0\n"), HasSubstr("optimizer.eps is 0"));
  EXPECT_THAT(bad("[train]\nsteps = 0\n"), HasSubstr("some/name.toml:2: train.steps is 0"));
  EXPECT_THAT(bad("", {{"train.steps", "0"}}), HasSubstr("--train.steps is 0"));
  EXPECT_THAT(bad("[optimizer]\nbeta1 = 1.0\n"), HasSubstr("optimizer.beta1 is 1"));
  EXPECT_THAT(bad("[optimizer]\nnesterov = true\n"), HasSubstr("optimizer.rule = \"sgd\""));
  EXPECT_THAT(bad("[engine]\nmemory_budget = 1\n"), HasSubstr("engine.memory_budget is 1 B"));
  EXPECT_THAT(bad("[engine]\nmemory_budget = \"unlimited\"\n"), HasSubstr("is unlimited"));
  EXPECT_THAT(bad("[engine]\nio_size = 5000\n"), HasSubstr("multiple of 4096"));
  EXPECT_THAT(bad("[[device]]\npath = \"a\"\n[[device]]\npath = \"./a/\"\n"),
              HasSubstr("device.1.path is also the path of device 0"));
  EXPECT_THAT(bad("[[device]]\nname = \"a\"\n"), HasSubstr("device 0 has no path"));
  EXPECT_THAT(bad("[model]\nwidth = 64\nheads = 5\n"), HasSubstr("model.heads"));
}

TEST(Recipe, AStateCacheIsASizeOfItsOwnSection) {
  EXPECT_EQ(good("").recipe.updater.state_cache_bytes, 0u);
  EXPECT_EQ(good("[memory]\nstate_cache = \"24GB\"\n").recipe.updater.state_cache_bytes,
            24'000'000'000u);
  const LoadedRecipe flagged = good("", {{"memory.state_cache", "1GiB"}});
  EXPECT_EQ(flagged.recipe.updater.state_cache_bytes, uint64_t{1} << 30);
  EXPECT_THAT(print_recipe(flagged), HasSubstr("state_cache = \"1GiB\""));
  EXPECT_THAT(bad("[memory]\nstate_cash = \"1GB\"\n"), HasSubstr("state_cache"));
  EXPECT_THAT(bad("[memory]\nstate_cache = \"much\"\n"), HasSubstr("memory.state_cache"));
  EXPECT_THAT(bad("[memory]\nstate_cache = \"1GB\"\n[optimizer]\nwhere = \"memory\"\n"),
              HasSubstr("memory.state_cache is set, but"));
}

TEST(Recipe, DevicesFromFlags) {
  const LoadedRecipe loaded =
      good("", {{"device.1.path", "b"}, {"device.0.path", "a"}, {"device.1.threads", "2"}});
  ASSERT_EQ(loaded.recipe.updater.devices.size(), 2u);
  EXPECT_EQ(loaded.recipe.updater.devices[0].path, "a");
  EXPECT_EQ(loaded.recipe.updater.devices[1].threads, 2u);
  EXPECT_EQ(loaded.origins.at("device.1.path").kind, Origin::Kind::kFlag);
  EXPECT_THAT(bad("", {{"device.2.path", "c"}}), HasSubstr("without gaps"));
  EXPECT_THAT(bad("", {{"device.path", "c"}}), HasSubstr("--device.0.path"));
  EXPECT_THAT(bad("", {{"device.0.paht", "c"}}), HasSubstr("did you mean device.path?"));
  EXPECT_THAT(bad("", {{"device.99999999999999999999.path", "c"}}), HasSubstr("device"));
  EXPECT_EQ(
      good("[[device]]\npath = 'x'\n", {{"device.0.path", "y"}}).recipe.updater.devices[0].path,
      "y");
}

TEST(Recipe, ADeviceMayNameItsRank) {
  const LoadedRecipe loaded = good("[[device]]\npath = \"a\"\n[[device]]\npath = \"b\"\nrank = 1\n",
                                   {{"device.2.path", "b"}, {"device.2.rank", "0"}});
  const auto& devices = loaded.recipe.updater.devices;
  ASSERT_EQ(devices.size(), 3u);
  EXPECT_EQ(devices[0].rank, engine::kAnyRank);
  EXPECT_EQ(devices[1].rank, 1u) << "on another machine the path may be the same";
  EXPECT_EQ(devices[2].rank, 0u);
  EXPECT_THAT(print_recipe(loaded), HasSubstr("rank = \"auto\""));
  EXPECT_THAT(bad("[[device]]\npath = \"a\"\nrank = \"first\"\n"),
              HasSubstr("the number of a rank, or \"auto\""));
}

TEST(Recipe, HomeIsWrittenOutAndVariablesAreErrors) {
  const char* home = std::getenv("HOME");
  const std::string before = home == nullptr ? "" : home;
  ASSERT_EQ(setenv("HOME", "/home/me", 1), 0);
  const Recipe recipe =
      good(
          "[model]\nfrom = \"~/m\"\n[data]\npaths = [\"python-stdlib\", \"~/a\"]\n"
          "evaluation = [\"x = ~/b\"]\n[train]\nrun = \"~/runs/=a,b\"\n[checkpoint]\n"
          "folder = \"~/c\"\n[[device]]\npath = \"~/d\"\n")
          .recipe;
  EXPECT_EQ(recipe.options.model.from, "/home/me/m");
  EXPECT_THAT(recipe.options.data.paths, ElementsAre("python-stdlib", "/home/me/a"));
  EXPECT_THAT(recipe.options.data.evaluation, ElementsAre("x = /home/me/b"));
  EXPECT_EQ(recipe.options.train.run, "/home/me/runs/=a,b");
  EXPECT_EQ(recipe.options.checkpoint.folder, "/home/me/c");
  EXPECT_EQ(recipe.updater.devices[0].path, "/home/me/d");
  ASSERT_EQ(setenv("HOME", before.c_str(), 1), 0);
  EXPECT_THAT(bad("[train]\nrun = \"$HOME/r\"\n"),
              HasSubstr("some/name.toml:2: train.run is $HOME/r"));
}

TEST(Recipe, APathWithACommaIsOne) {
  const base::Scratch scratch;
  const std::string file = scratch / "lr=0.1,wd=0";
  std::ofstream(file) << "text";
  const std::string others[] = {file, "a,b"};
  std::vector<std::vector<std::string>> paths;
  for (const std::string& value : others) {
    paths.push_back(good("", {{"data.paths", value}}).recipe.options.data.paths);
  }
  EXPECT_THAT(paths[0], ElementsAre(file));
  EXPECT_THAT(paths[1], ElementsAre("a", "b"));
}

TEST(Recipe, InputsAreKeptForAnyWorkingDirectory) {
  const base::Scratch scratch;
  const auto before = std::filesystem::current_path();
  std::filesystem::create_directories(scratch / "here/model");
  std::filesystem::current_path(scratch / "here");
  Recipe recipe = good(
                      "[model]\nfrom = \"../here/model\"\n[data]\npaths = [\"python-stdlib\"]\n"
                      "[train]\nrun = \"r\"\n")
                      .recipe;
  make_inputs_absolute(recipe);
  std::filesystem::current_path(before);
  EXPECT_EQ(recipe.options.model.from, scratch / "here/model");
  EXPECT_THAT(recipe.options.data.paths, ElementsAre("python-stdlib"));
  EXPECT_EQ(recipe.options.train.run, "r");
}

TEST(Recipe, MissingFileAndDirectoryAreNamed) {
  const auto missing = load_recipe("/no/such/recipe.toml", {});
  ASSERT_FALSE(missing.ok());
  EXPECT_EQ(missing.status().code(), ErrorCode::kNotFound);
  EXPECT_THAT(missing.status().to_string(), HasSubstr("/no/such/recipe.toml"));
  const auto directory = load_recipe("/", {});
  ASSERT_FALSE(directory.ok());
  EXPECT_THAT(directory.status().to_string(), HasSubstr("directory"));
}

TEST(Flags, AreTakenOutOfTheCommandLine) {
  std::vector<std::string> words{"train",
                                 "--train.steps",
                                 "100",
                                 "r.toml",
                                 "--train.lr=1e-3",
                                 "--verbose",
                                 "--model.tied_head",
                                 "--model.tied_head",
                                 "false",
                                 "--set",
                                 "data.paths=a,b",
                                 "--set=train.seed=3",
                                 "--out=./x.y"};
  const auto taken = take_overrides(words);
  ASSERT_TRUE(taken.ok());
  EXPECT_THAT(words, testing::ElementsAre("train", "r.toml", "--verbose", "--out=./x.y"));
  std::vector<std::string> seen;
  for (const Override& override : *taken) seen.push_back(override.key + ":" + override.value);
  EXPECT_THAT(seen,
              testing::ElementsAre("train.steps:100", "train.lr:1e-3", "model.tied_head:true",
                                   "model.tied_head:false", "data.paths:a,b", "train.seed:3"));
}

TEST(Flags, NeedValues) {
  std::vector<std::string> last{"--train.steps"};
  EXPECT_THAT(take_overrides(last).status().to_string(), HasSubstr("--train.steps needs a value"));
  std::vector<std::string> followed{"--train.steps", "--train.lr", "1"};
  EXPECT_FALSE(take_overrides(followed).ok());
  std::vector<std::string> set{"--set", "train.steps"};
  EXPECT_THAT(take_overrides(set).status().to_string(), HasSubstr("KEY=VALUE"));
  std::vector<std::string> negative{"--train.lr", "-1"};
  EXPECT_TRUE(take_overrides(negative).ok());
  std::vector<std::string> ended{"--", "--train.steps", "1"};
  EXPECT_TRUE(take_overrides(ended)->empty());
}

TEST(Keys, OfOlderRunsAreRead) {
  const LoadedRecipe loaded = good("[train]\nsample_prompt = 'def '\n[[device]]\npath = 'x'\n");
  EXPECT_THAT(loaded.recipe.options.train.sample_prompts, testing::ElementsAre("def "));
}

TEST(Print, ShowsOriginsAndReadsBackTheSame) {
  const LoadedRecipe loaded = good(
      "[train]\nsteps = 5\nsample_prompts = [\"a\\n\\\"\\\\\\u0001\"]\n[[device]]\npath = 'x'\n",
      {{"train.lr", "0.125"}, {"data.paths", "a,b"}, {"engine.memory_budget", "3MB"}});
  const std::string printed = print_recipe(loaded);
  EXPECT_THAT(printed, testing::ContainsRegex("steps = 5 +# some/name.toml:2"));
  EXPECT_THAT(printed, testing::ContainsRegex("lr = 0.125 +# flag"));
  EXPECT_THAT(printed, testing::ContainsRegex("layers = 6 +# default"));
  EXPECT_THAT(printed, testing::ContainsRegex("path = \"x\" +# some/name.toml:5"));
  LoadedRecipe again = good(printed);
  again.path = loaded.path;
  again.origins = loaded.origins;
  EXPECT_EQ(print_recipe(again), printed);
}

TEST(Keys, AreUniqueSortedBySectionAndExplained) {
  std::set<std::string_view> names;
  for (const Key& key : keys()) {
    EXPECT_TRUE(names.insert(key.name).second) << key.name;
    EXPECT_NE(key.help, "") << key.name;
    EXPECT_TRUE(std::ranges::find(sections(), section_of(key.name), &Section::name) !=
                sections().end())
        << key.name;
  }
}

TEST(Keys, EveryKeyHasAFieldOfItsOwn) {
  Recipe recipe;
  recipe.updater.devices.resize(1);
  std::set<const void*> places;
  for (const Key& key : keys()) {
    const void* place = std::visit(
        [](auto field) -> const void* {
          if constexpr (std::is_pointer_v<decltype(field)>) {
            return field;
          } else if constexpr (std::is_same_v<decltype(field), base::Number>) {
            return std::visit([](auto* value) -> const void* { return value; }, field.value);
          } else {
            return field.value;
          }
        },
        key.field(recipe, 0));
    EXPECT_TRUE(places.insert(place).second) << key.name;
  }
}

TEST(Reference, PageIsInStepWithTheKeys) {
  EXPECT_EQ(read(std::filesystem::path(SMARTINF_ROOT) / "docs/recipe.md"), recipe_reference())
      << "run: smartinf train --help-recipe=markdown > docs/recipe.md";
}

TEST(Reference, HelpNamesEveryKey) {
  const std::string help = recipe_help();
  for (const Key& key : keys())
    EXPECT_THAT(help, HasSubstr(std::string(name_of(key.name)) + " = "));
}

TEST(Recipes, OfTheProjectAreValid) {
  const std::filesystem::path folder = std::filesystem::path(SMARTINF_ROOT) / "recipes";
  if (!std::filesystem::exists(folder)) GTEST_SKIP() << "no recipes";
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() != ".toml") continue;
    const auto loaded = load_recipe(entry.path().string(), {});
    EXPECT_TRUE(loaded.ok()) << (loaded.ok() ? "" : loaded.status().to_string());
  }
}

TEST(Recipe, Compression) {
  const LoadedRecipe loaded = good(
      "[compress]\ndensity = 0.05\nvalues = \"f16\"\nerror_feedback = false\n"
      "warmup_steps = 100\nresidual_every = 8\n",
      {});
  const compress::CompressOptions& compress = loaded.recipe.updater.compress;
  EXPECT_TRUE(compress.on());
  EXPECT_EQ(compress.density, 0.05);
  EXPECT_EQ(compress.values, compress::ValueEncoding::kF16);
  EXPECT_FALSE(compress.error_feedback);
  EXPECT_EQ(compress.warmup_steps, 100u);
  EXPECT_EQ(compress.residual_every, 8u);
  const auto values = [](const std::string& text) {
    return good("[compress]\n" + text, {}).recipe.updater.compress.values;
  };
  EXPECT_EQ(values(""), compress::ValueEncoding::kSign);
  EXPECT_EQ(values("density = 0.1\n"), compress::ValueEncoding::kSign);
  EXPECT_EQ(values("density = 0.1\nerror_feedback = false\n"), compress::ValueEncoding::kBf16);
  EXPECT_EQ(values("density = 0.1\nvalues = \"bf16\"\n"), compress::ValueEncoding::kBf16);
  const auto stages = [](const std::string& text) {
    const LoadedRecipe made =
        good("[compress]\ndensity = 0.1\n" + text + "[ranks]\ncluster = \"boxes.toml\"\n");
    EXPECT_THAT(print_recipe(made), HasSubstr(text.substr(0, text.find('\n'))));
    return made.recipe.updater.compress.stages;
  };
  EXPECT_EQ(stages(""), compress::kAllStages);
  EXPECT_EQ(stages("stages = \"all\"\n"), compress::kAllStages);
  EXPECT_EQ(stages("stages = \"auto\"\n"), compress::kChosenStages);
  EXPECT_EQ(stages("stages = 2\n"), 2u);
  EXPECT_THAT(bad("[compress]\ndensity = 0.1\nstages = \"some\"\n"),
              HasSubstr("expected the number of stages, or \"all\" or \"auto\""));
  EXPECT_THAT(bad("[compress]\ndensity = 0.1\nstages = \"auto\"\n"),
              HasSubstr("compress.stages is \"auto\", but ranks.cluster names no file"));
  EXPECT_FALSE(good("", {}).recipe.updater.compress.on());
  EXPECT_FALSE(
      good("[compress]\ndensity = 0.0\nwarmup_steps = 3\n", {}).recipe.updater.compress.on());
  EXPECT_THAT(bad("[compress]\ndensitiy = 0.1\n"), HasSubstr("compress.density"));
  EXPECT_THAT(bad("[compress]\nwarmup_steps = 3\n"),
              HasSubstr(":2: compress.warmup_steps is given without"));
  EXPECT_THAT(bad("", {{"compress.warmup_steps", "3"}}),
              HasSubstr("--compress.warmup_steps is given without"));
  EXPECT_THAT(bad("[compress]\ndensity = -0.1\n"), HasSubstr("compress.density"));
  EXPECT_THAT(bad("[compress]\ndensity = 1.5\n"), HasSubstr("compress.density"));
  EXPECT_THAT(bad("[compress]\nvalues = \"int8\"\n"), HasSubstr("\"sign\""));
  EXPECT_THAT(bad("[compress]\ndensity = 0.1\n[optimizer]\nwhere = \"memory\"\n"),
              HasSubstr("optimizer.where"));
  // Keys of earlier versions say what to write in their place.
  EXPECT_THAT(bad("[compress]\ncodec = \"topk\"\n"), HasSubstr("compress.density"));
  EXPECT_THAT(bad("[compress]\nratio = 0.02\n"), HasSubstr("density = 0.08"));
  EXPECT_THAT(bad("[compress]\nkeep_every = 16\n"), HasSubstr("compress.residual_every"));
  EXPECT_THAT(bad("", {{"compress.feedback", "none"}}), HasSubstr("compress.error_feedback"));
  EXPECT_THAT(bad("[compress]\nratio_max = 0.1\n"), HasSubstr("no longer"));
}

TEST(Recipe, EpochsStandInPlaceOfSteps) {
  const LoadedRecipe loaded = good("[train]\nepochs = 1.5\n");
  EXPECT_EQ(loaded.recipe.options.train.steps, 0u);
  EXPECT_EQ(good(print_recipe(loaded)).recipe.options.train.epochs, 1.5);
  EXPECT_THAT(
      bad("[train]\nepochs = 1.5\nsteps = 10\n"),
      HasSubstr("some/name.toml:2: train.epochs is 1.5, but train.steps is given too (10)"));
  EXPECT_EQ(good("[train]\nsteps = 10\n", {{"train.epochs", "2"}, {"train.steps", "0"}})
                .recipe.options.train.epochs,
            2);
}

TEST(Keys, HelpBeginsWithWhatTheKeyIs) {
  for (const Key& key : keys()) {
    const std::string_view first = key.help.substr(0, key.help.find(' '));
    for (const std::string_view other :
         {"of", "in", "on", "that", "likewise,", "relative", "0:", "the", "what", "where"}) {
      EXPECT_NE(first, other) << key.name << ": " << key.help;
    }
    EXPECT_TRUE(std::isalpha(static_cast<unsigned char>(key.help.front()))) << key.name;
  }
}

}  // namespace
}  // namespace smartinf::config
