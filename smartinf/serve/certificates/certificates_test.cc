#include "smartinf/serve/certificates/certificates.h"

#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include "smartinf/base/file.h"
#include "smartinf/base/log.h"
#include "smartinf/base/test_scratch.h"

namespace smartinf::serve {
namespace {

using base::ErrorCode;
using base::Status;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr CertificateRole kServer = CertificateRole::kServer;
constexpr CertificateRole kClient = CertificateRole::kClient;

TEST(CertificateNames, ServersAreDnsNamesOrAddresses) {
  for (const char* good :
       {"nas", "nas.example.org", "10.0.0.5", "::1", "fd00::12", "3com.com", "a-b.c"}) {
    EXPECT_TRUE(check_certificate_name(kServer, good).ok()) << good;
  }
  const std::string long_label(64, 'a');
  for (const std::string& bad :
       {std::string(), std::string("-nas"), std::string("nas-"), std::string("a..b"),
        std::string(".a"), std::string("a."), std::string("10.0.0.256"), std::string("10.0.0"),
        std::string("a/b"), std::string("../x"), std::string("a,DNS:b"), std::string("n\0s", 3),
        std::string("10.0.0.5\0x", 10), std::string("nás"), long_label, std::string(254, 'a'),
        std::string("a.-b"), std::string("a-.b")}) {
    EXPECT_EQ(check_certificate_name(kServer, bad).code(), ErrorCode::kInvalidArgument) << bad;
  }
}

TEST(CertificateNames, ClientsArePlain) {
  for (const char* good : {"gpu1", "a", "team_a.node-7", "9"}) {
    EXPECT_TRUE(check_certificate_name(kClient, good).ok()) << good;
  }
  for (const std::string& bad :
       {std::string(), std::string("."), std::string(".."), std::string("-a"), std::string("a/b"),
        std::string("a b"), std::string("a\n"), std::string("a\0", 2), std::string(65, 'a')}) {
    EXPECT_EQ(check_certificate_name(kClient, bad).code(), ErrorCode::kInvalidArgument) << bad;
  }
}

mode_t mode_of(const std::string& path) {
  struct stat entry {};
  return ::stat(path.c_str(), &entry) == 0 ? entry.st_mode & 07777 : 0;
}

void copy_file(const std::string& from, const std::string& to) {
  std::filesystem::copy_file(from, to, std::filesystem::copy_options::overwrite_existing);
}

/// Whether a shell command, here of OpenSSL, ends with 0.
bool succeeds(const std::string& command) {
  return std::system((command + " >/dev/null 2>&1").c_str()) == 0;
}

class Certificates : public testing::Test {
 protected:
  void SetUp() override {
    const auto authority = CertificateAuthority::open_or_make(folder_);
    if (!authority.ok() && authority.status().code() == ErrorCode::kUnsupported) {
      GTEST_SKIP() << authority.status().to_string();
    }
    ASSERT_TRUE(authority.ok()) << authority.status().to_string();
    EXPECT_TRUE(authority->made());
  }

  CertificateAuthority open() {
    auto authority = CertificateAuthority::open(folder_);
    SI_CHECK(authority.ok(), "no authority");
    return std::move(*authority);
  }
  CertificateFacts issue(CertificateRequest request) {
    auto facts = open().issue(request);
    SI_CHECK(facts.ok(), "no certificate");
    return *facts;
  }
  static CredentialFiles files_in(const std::string& folder) {
    return {folder + "/certificate.pem", folder + "/key.pem", folder + "/ca.pem"};
  }
  Status credentials(const std::string& folder, CertificateRole role) {
    return read_credentials(files_in(folder), role).status();
  }

  base::Scratch scratch_;
  const std::string folder_ = scratch_ / "ca";
  const std::string server_ = folder_ + "/servers/nas";
  const std::string client_ = folder_ + "/clients/gpu1";
};

TEST_F(Certificates, AreWhatOpensslExpects) {
  const CertificateFacts server = issue({kServer, "nas", {"10.0.0.5", "::1", "nas.lan"}, 30});
  const CertificateFacts client = issue({kClient, "gpu1"});
  EXPECT_THAT(server.addresses, ElementsAre("nas", "10.0.0.5", "::1", "nas.lan"));
  EXPECT_EQ(server.serial.size(), 32u);
  EXPECT_NE(server.serial, client.serial);
  EXPECT_NEAR(static_cast<double>(server.until_s - ::time(nullptr)), 30 * 86400, 400);
  EXPECT_NEAR(static_cast<double>(client.until_s - ::time(nullptr)), 365 * 86400, 400);
  EXPECT_NEAR(static_cast<double>(open().until_s() - ::time(nullptr)), 3650.0 * 86400, 400);

  if (!succeeds("openssl version")) GTEST_SKIP() << "there is no openssl command here";
  const std::string verify = "openssl verify -x509_strict -CAfile " + server_ + "/ca.pem ";
  const std::string crl = "-crl_check -CRLfile " + folder_ + "/revoked.crl ";
  const std::string of_server = server_ + "/certificate.pem";
  const std::string of_client = client_ + "/certificate.pem";
  EXPECT_TRUE(succeeds(verify + crl + "-purpose sslserver -verify_hostname nas " + of_server));
  EXPECT_TRUE(succeeds(verify + "-purpose sslserver -verify_ip 10.0.0.5 " + of_server));
  EXPECT_TRUE(succeeds(verify + "-purpose sslserver -verify_ip ::1 " + of_server));
  EXPECT_FALSE(succeeds(verify + "-purpose sslserver -verify_hostname other " + of_server));
  EXPECT_FALSE(succeeds(verify + "-purpose sslclient " + of_server));
  EXPECT_TRUE(succeeds(verify + crl + "-purpose sslclient " + of_client));
  EXPECT_FALSE(succeeds(verify + "-purpose sslserver " + of_client));
  // No authority below this one.
  EXPECT_TRUE(succeeds("openssl x509 -in " + folder_ +
                       "/ca/certificate.pem -noout -text | grep -q 'CA:TRUE, pathlen:0'"));
}

TEST_F(Certificates, KeysAreForNobodyElse) {
  const mode_t before = ::umask(0);
  issue({kServer, "nas"});
  issue({kClient, "gpu1"});
  ::umask(before);
  EXPECT_EQ(mode_of(folder_), 0700u);
  for (const std::string& place : {folder_ + "/ca", server_, client_}) {
    EXPECT_EQ(mode_of(place), 0700u) << place;
    EXPECT_EQ(mode_of(place + "/key.pem"), 0600u) << place;
  }
  ASSERT_EQ(::chmod(folder_.c_str(), 0750), 0);
  EXPECT_EQ(CertificateAuthority::open(folder_).status().code(), ErrorCode::kFailedPrecondition);
}

TEST_F(Certificates, NothingIsOverwritten) {
  issue({kClient, "gpu1"});
  const auto key = base::read_text_file(client_ + "/key.pem", "");
  const auto again = open().issue({kClient, "gpu1"});
  EXPECT_EQ(again.status().code(), ErrorCode::kAlreadyExists);
  EXPECT_EQ(*base::read_text_file(client_ + "/key.pem", ""), *key);
  EXPECT_EQ(open().issued()->size(), 1u);

  // Nor anything that is no authority's.
  std::filesystem::create_directory(scratch_ / "home");
  ASSERT_EQ(::chmod((scratch_ / "home").c_str(), 0700), 0);
  std::ofstream(scratch_ / "home" += "/notes") << "mine";
  EXPECT_EQ(CertificateAuthority::open_or_make(scratch_ / "home").status().code(),
            ErrorCode::kFailedPrecondition);
  EXPECT_EQ(CertificateAuthority::open(scratch_ / "none").status().code(), ErrorCode::kNotFound);
}

TEST_F(Certificates, OneProcessAtATime) {
  const CertificateAuthority first = open();
  EXPECT_EQ(CertificateAuthority::open(folder_).status().code(), ErrorCode::kBusy);
}

TEST_F(Certificates, WhatWasInterruptedIsDoneAgain) {
  std::filesystem::create_directory(folder_ + "/.making");
  std::ofstream(folder_ + "/.making/key.pem") << "half a key";
  issue({kClient, "gpu1"});
  EXPECT_FALSE(std::filesystem::exists(folder_ + "/.making"));
  std::filesystem::remove_all(folder_ + "/ca");
  std::filesystem::remove_all(client_);
  EXPECT_TRUE(CertificateAuthority::open_or_make(folder_)->made());
  issue({kClient, "gpu1"});
  EXPECT_TRUE(credentials(client_, kClient).ok());
}

TEST_F(Certificates, BadRequestsAreRefused) {
  EXPECT_EQ(open().issue({kServer, "a/b"}).status().code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(open().issue({kServer, "nas", {"x y"}}).status().code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(open().issue({kClient, "gpu1", {"10.0.0.5"}}).status().code(),
            ErrorCode::kInvalidArgument);
  EXPECT_EQ(open().issue({kClient, "gpu1", {}, 0}).status().code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(open().issue({kClient, "gpu1", {}, 3651}).status().code(), ErrorCode::kInvalidArgument);
  EXPECT_TRUE(open().issued()->empty());
}

TEST_F(Certificates, NeverOutliveTheirAuthority) {
  const CertificateFacts facts =
      issue({kClient, "gpu1", {}, kAuthorityDays, ::time(nullptr) + 10 * 86400});
  EXPECT_EQ(facts.until_s, open().until_s());
}

TEST_F(Certificates, AreCheckedBeforeTheyAreUsed) {
  issue({kServer, "nas"});
  issue({kClient, "gpu1"});
  const auto read = read_credentials(files_in(server_), kServer);
  ASSERT_TRUE(read.ok()) << read.status().to_string();
  EXPECT_EQ(read->facts.name, "nas");
  EXPECT_THAT(read->key_pem, HasSubstr("PRIVATE KEY"));
  EXPECT_EQ(certificate_facts(read->certificate_pem)->serial, read->facts.serial);

  EXPECT_THAT(credentials(client_, kServer).to_string(), HasSubstr("gpu1 is not for a server"));
  EXPECT_THAT(credentials(server_, kClient).to_string(), HasSubstr("nas is not for a client"));

  const int64_t now = ::time(nullptr);
  issue({kClient, "old", {}, 1, now - 3 * 86400});
  issue({kClient, "early", {}, 1, now + 86400});
  EXPECT_THAT(credentials(folder_ + "/clients/old", kClient).to_string(),
              HasSubstr("old expired on 20"));
  EXPECT_THAT(credentials(folder_ + "/clients/early", kClient).to_string(), HasSubstr("clock"));

  const std::string mixed = scratch_ / "mixed";
  std::filesystem::copy(client_, mixed);
  copy_file(server_ + "/key.pem", mixed + "/key.pem");
  EXPECT_EQ(credentials(mixed, kClient).code(), ErrorCode::kMismatch);
  EXPECT_THAT(credentials(mixed, kClient).to_string(), HasSubstr("not the key of"));

  const std::string other_folder = scratch_ / "other";
  ASSERT_TRUE(CertificateAuthority::open_or_make(other_folder).ok());
  copy_file(client_ + "/key.pem", mixed + "/key.pem");
  copy_file(other_folder + "/ca/certificate.pem", mixed + "/ca.pem");
  EXPECT_THAT(credentials(mixed, kClient).to_string(),
              HasSubstr("was not issued by the authority"));
  std::ofstream(mixed + "/ca.pem") << "no PEM";
  EXPECT_EQ(credentials(mixed, kClient).code(), ErrorCode::kCorrupt);
  copy_file(client_ + "/ca.pem", mixed + "/ca.pem");
  EXPECT_TRUE(credentials(mixed, kClient).ok());

  ASSERT_EQ(::chmod((mixed + "/key.pem").c_str(), 0644), 0);
  EXPECT_EQ(credentials(mixed, kClient).code(), ErrorCode::kPermissionDenied);
  ASSERT_EQ(::chmod((mixed + "/key.pem").c_str(), 0640), 0);
  EXPECT_TRUE(credentials(mixed, kClient).ok());
  std::ofstream(mixed + "/key.pem")
      << "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n";
  EXPECT_EQ(credentials(mixed, kClient).code(), ErrorCode::kCorrupt);
  std::ofstream(mixed + "/certificate.pem") << "";
  EXPECT_EQ(credentials(mixed, kClient).code(), ErrorCode::kCorrupt);
  std::filesystem::remove(mixed + "/certificate.pem");
  EXPECT_EQ(credentials(mixed, kClient).code(), ErrorCode::kNotFound);
}

TEST_F(Certificates, AreRevokedByNameOrSerial) {
  issue({kServer, "nas"});
  issue({kClient, "gpu1"});
  const CertificateFacts gpu2 = issue({kClient, "gpu2"});
  const std::string crl = folder_ + "/revoked.crl";
  const auto list = RevocationList::open(crl, server_ + "/ca.pem");
  ASSERT_TRUE(list.ok()) << list.status().to_string();
  const std::string pem = *base::read_text_file(client_ + "/certificate.pem", "");
  const std::string pem2 = *base::read_text_file(folder_ + "/clients/gpu2/certificate.pem", "");
  EXPECT_FALSE((*list)->is_revoked(pem));
  EXPECT_TRUE((*list)->is_revoked("no certificate"));
  EXPECT_FALSE((*list)->is_serial_revoked(gpu2.serial));
  for (const char* bad : {"", "-1", "12x", "x"})
    EXPECT_TRUE((*list)->is_serial_revoked(bad)) << bad;

  ASSERT_TRUE(open().revoke("gpu1").ok());
  EXPECT_TRUE((*list)->is_revoked(pem));
  EXPECT_FALSE((*list)->is_revoked(pem2));
  const auto by_serial = open().revoke(gpu2.serial);
  ASSERT_TRUE(by_serial.ok());
  EXPECT_EQ(by_serial->front().name, "gpu2");
  EXPECT_TRUE((*list)->is_revoked(pem2));
  EXPECT_TRUE((*list)->is_serial_revoked(gpu2.serial));
  EXPECT_EQ((*list)->size(), 2u);
  EXPECT_EQ(open().revoke("gpu1").status().code(), ErrorCode::kAlreadyExists);
  EXPECT_EQ(open().revoke("gpu3").status().code(), ErrorCode::kNotFound);

  const auto issued = open().issued();
  ASSERT_EQ(issued->size(), 3u);
  for (const CertificateFacts& facts : *issued) {
    EXPECT_EQ(facts.revoked_s.has_value(), facts.name != "nas") << facts.name;
  }
  // A new one of the same name is not revoked.
  std::filesystem::remove_all(client_);
  issue({kClient, "gpu1"});
  EXPECT_FALSE((*list)->is_revoked(*base::read_text_file(client_ + "/certificate.pem", "")));

  if (!succeeds("openssl version")) GTEST_SKIP() << "there is no openssl command here";
  const std::string verify =
      "openssl verify -crl_check -CRLfile " + crl + " -CAfile " + server_ + "/ca.pem ";
  EXPECT_TRUE(succeeds(verify + client_ + "/certificate.pem"));
  EXPECT_FALSE(succeeds(verify + folder_ + "/clients/gpu2/certificate.pem"));
}

TEST_F(Certificates, AListThatCannotBeUsedRevokesNothingLess) {
  issue({kServer, "nas"});
  issue({kClient, "gpu1"});
  ASSERT_TRUE(open().revoke("gpu1").ok());
  const std::string crl = scratch_ / "revoked.crl";
  copy_file(folder_ + "/revoked.crl", crl);
  const auto list = RevocationList::open(crl, server_ + "/ca.pem");
  ASSERT_TRUE(list.ok());
  const std::string pem = *base::read_text_file(client_ + "/certificate.pem", "");

  std::vector<std::string> logged;
  base::set_log_sink([&](base::LogLevel, std::string_view text) { logged.emplace_back(text); });
  const std::string other_folder = scratch_ / "other";
  ASSERT_TRUE(CertificateAuthority::open_or_make(other_folder).ok());
  copy_file(other_folder + "/revoked.crl", crl);
  EXPECT_TRUE((*list)->is_revoked(pem));
  EXPECT_TRUE((*list)->is_revoked(pem));
  EXPECT_EQ(logged.size(), 1u) << "once for each state of the file";
  std::ofstream(crl) << "half";
  EXPECT_TRUE((*list)->is_revoked(pem));
  std::filesystem::remove(crl);
  EXPECT_TRUE((*list)->is_revoked(pem));
  EXPECT_EQ(logged.size(), 3u);
  base::set_log_sink({});

  EXPECT_EQ(
      RevocationList::open(other_folder + "/revoked.crl", server_ + "/ca.pem").status().code(),
      ErrorCode::kMismatch);
}

}  // namespace
}  // namespace smartinf::serve
