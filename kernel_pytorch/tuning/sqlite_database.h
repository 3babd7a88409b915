// SQLite with scoped handles and one exception, which never leaves tuning: store.cpp turns it into "memory only", into
// a damaged file set aside, or into an Error for a caller who asked for the store itself.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <string_view>

struct sqlite3;
struct sqlite3_stmt;

namespace kernel_pytorch::tuning {

class SqliteFailure : public std::exception {
 public:
  SqliteFailure(int code, std::string message) : code_(code), message_(std::move(message)) {}
  int code() const { return code_; }  // the primary result code
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  int code_;
  std::string message_;
};

enum class OpenMode : uint8_t {
  kCreate,     // read and write, made where missing
  kExisting,   // read and write, must exist
  kImmutable,  // read only, no locks, no side files: for read-only file systems
};

class Database {
 public:
  Database(const std::string& path, OpenMode mode, int busy_milliseconds);
  ~Database();
  Database(const Database&) = delete;
  Database& operator=(const Database&) = delete;

  void execute(const char* sql);
  std::string query_text(const char* sql);  // first column of the first row; empty where there is none
  int64_t query_number(const char* sql);
  int64_t changes() const;  // rows that the last statement wrote
  sqlite3* handle() const { return handle_; }

 private:
  sqlite3* handle_ = nullptr;
};

class Statement {
 public:
  Statement(Database& database, const char* sql);
  ~Statement();
  Statement(const Statement&) = delete;
  Statement& operator=(const Statement&) = delete;

  bool step();  // true while there is a row
  void reset();
  void bind(int index, std::string_view text);  // from 1; the text must live until the step
  void bind(int index, double number);
  // What a damaged or foreign file holds may be of any type: false where it is not what was asked for.
  bool read(int column, std::string& text) const;
  bool read(int column, double& number) const;

 private:
  Database& database_;
  sqlite3_stmt* handle_ = nullptr;
};

// A write transaction that is rolled back unless committed.
class Transaction {
 public:
  explicit Transaction(Database& database);
  ~Transaction();
  Transaction(const Transaction&) = delete;
  Transaction& operator=(const Transaction&) = delete;
  void commit();

 private:
  Database& database_;
  bool open_ = true;
};

}  // namespace kernel_pytorch::tuning
