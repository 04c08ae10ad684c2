#include "smartinf/serve/certificates/certificates.h"

#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "smartinf/base/file.h"
#include "smartinf/base/log.h"
#include "smartinf/base/test_scratch.h"
#include "smartinf/serve/test_odd_certificates.h"

namespace smartinf::serve {
namespace {

using base::ErrorCode;
using base::Status;
using testing::HasSubstr;
using wire::TestAuthority;
using wire::TestCertificate;

constexpr CertificateRole kServer = CertificateRole::kServer;
constexpr CertificateRole kClient = CertificateRole::kClient;

void copy_file(const std::string& from, const std::string& to) {
  std::filesystem::copy_file(from, to, std::filesystem::copy_options::overwrite_existing);
}

/// Tests of reading what scripts/certificates.py makes; tests/certificates_test.py is about the
/// script.
class Certificates : public testing::Test {
 protected:
  Status credentials(const TestCertificate& one, CertificateRole role, const std::string& ca) {
    return read_credentials({one.certificate, one.key, ca}, role).status();
  }
  Status credentials(const TestCertificate& one, CertificateRole role) {
    return credentials(one, role, authority_.ca());
  }
  static std::string pem_of(const TestCertificate& one) {
    return *base::read_text_file(one.certificate, "");
  }

  base::Scratch scratch_;
  const TestAuthority authority_{scratch_.path().string()};
  const TestAuthority other_{scratch_ / "other"};
};

TEST_F(Certificates, AreCheckedBeforeTheyAreUsed) {
  const TestCertificate server = authority_.server("nas");
  const TestCertificate client = authority_.client("gpu1");
  const auto read = read_credentials({server.certificate, server.key, authority_.ca()}, kServer);
  ASSERT_TRUE(read.ok()) << read.status().to_string();
  EXPECT_EQ(read->name, "nas");
  EXPECT_NEAR(static_cast<double>(read->until_s - ::time(nullptr)), 365 * 86400, 400);
  EXPECT_EQ(*client_name(pem_of(client)), "gpu1");

  EXPECT_THAT(credentials(client, kServer).to_string(), HasSubstr("gpu1 is not for a server"));
  EXPECT_THAT(credentials(server, kClient).to_string(), HasSubstr("nas is not for a client"));

  const TestCertificate old =
      issue_odd(authority_, {.names = {"old"}, .from_s = -2 * 86400, .until_s = -86400});
  const TestCertificate early =
      issue_odd(authority_, {.names = {"early"}, .from_s = 86400, .until_s = 2 * 86400});
  EXPECT_THAT(credentials(old, kClient).to_string(), HasSubstr("old expired on 20"));
  EXPECT_THAT(credentials(early, kClient).to_string(), HasSubstr("clock"));

  const Status mixed = credentials({client.certificate, server.key}, kClient);
  EXPECT_EQ(mixed.code(), ErrorCode::kMismatch);
  EXPECT_THAT(mixed.to_string(), HasSubstr("not the key of"));

  std::filesystem::create_directory(scratch_ / "other");
  other_.client("gpu1");
  EXPECT_THAT(credentials(client, kClient, other_.ca()).to_string(),
              HasSubstr("was not issued by the authority"));
  const std::string bad = scratch_ / "bad.pem";
  std::ofstream(bad) << "no PEM";
  EXPECT_EQ(credentials(client, kClient, bad).code(), ErrorCode::kCorrupt);
  EXPECT_TRUE(credentials(client, kClient).ok());

  ASSERT_EQ(::chmod(client.key.c_str(), 0644), 0);
  EXPECT_EQ(credentials(client, kClient).code(), ErrorCode::kPermissionDenied);
  ASSERT_EQ(::chmod(client.key.c_str(), 0640), 0);
  EXPECT_TRUE(credentials(client, kClient).ok());
  std::ofstream(client.key) << "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n";
  EXPECT_EQ(credentials(client, kClient).code(), ErrorCode::kCorrupt);
  std::ofstream(client.certificate) << "";
  EXPECT_EQ(credentials(client, kClient).code(), ErrorCode::kCorrupt);
  std::filesystem::remove(client.certificate);
  EXPECT_EQ(credentials(client, kClient).code(), ErrorCode::kNotFound);
}

TEST_F(Certificates, AreRevokedWhileAServerReadsTheList) {
  authority_.server("nas");
  const std::string pem = pem_of(authority_.client("gpu1"));
  const std::string pem2 = pem_of(authority_.client("gpu2"));
  const auto list = RevocationList::open(authority_.revoked(), authority_.ca());
  ASSERT_TRUE(list.ok()) << list.status().to_string();
  EXPECT_FALSE((*list)->is_revoked(pem));
  EXPECT_TRUE((*list)->is_revoked("no certificate"));
  authority_.run("--revoke gpu1");
  EXPECT_TRUE((*list)->is_revoked(pem));
  EXPECT_FALSE((*list)->is_revoked(pem2));
  authority_.run("--revoke gpu2");
  EXPECT_TRUE((*list)->is_revoked(pem));
  EXPECT_TRUE((*list)->is_revoked(pem2));
  // A new one of the same name is not revoked.
  std::filesystem::remove_all(scratch_ / "authority/clients/gpu1");
  EXPECT_FALSE((*list)->is_revoked(pem_of(authority_.client("gpu1"))));
}

TEST_F(Certificates, AListThatCannotBeUsedRevokesNothingLess) {
  const std::string pem = pem_of(authority_.client("gpu1"));
  authority_.run("--revoke gpu1");
  const std::string crl = scratch_ / "revoked.crl";
  copy_file(authority_.revoked(), crl);
  const auto list = RevocationList::open(crl, authority_.ca());
  ASSERT_TRUE(list.ok());

  std::vector<std::string> logged;
  base::set_log_sink([&](base::LogLevel, std::string_view text) { logged.emplace_back(text); });
  std::filesystem::create_directory(scratch_ / "other");
  other_.client("gpu1");
  copy_file(other_.revoked(), crl);
  EXPECT_TRUE((*list)->is_revoked(pem));
  EXPECT_TRUE((*list)->is_revoked(pem));
  EXPECT_EQ(logged.size(), 1u) << "once for each state of the file";
  std::ofstream(crl) << "half";
  EXPECT_TRUE((*list)->is_revoked(pem));
  std::filesystem::remove(crl);
  EXPECT_TRUE((*list)->is_revoked(pem));
  EXPECT_EQ(logged.size(), 3u);
  base::set_log_sink({});

  EXPECT_EQ(RevocationList::open(other_.revoked(), authority_.ca()).status().code(),
            ErrorCode::kMismatch);
}

}  // namespace
}  // namespace smartinf::serve
