package regular

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestReadFile(t *testing.T) {
	dir := t.TempDir()
	path := func(name string) string { return filepath.Join(dir, name) }
	for name, content := range map[string]string{"empty": "", "small": "12345678", "large": "123456789"} {
		if err := os.WriteFile(path(name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Mkfifo(path("fifo"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"empty": "", "small": "12345678"} {
		if got, err := ReadFile(path(name), 8); string(got) != want || err != nil {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
	for name, want := range map[string]string{
		"large": "has 9 bytes, the limit is 8", "fifo": "is a FIFO, not a regular file", ".": "is a directory",
		"missing": "no such file",
	} {
		data, err := ReadFile(path(name), 8)
		if data != nil || err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %q, %v; want an error with %q", name, data, err, want)
		}
	}
	if _, err := ReadFile("/dev/zero", 8); err == nil || !strings.Contains(err.Error(), "is a character device") {
		t.Errorf("a device: %v", err)
	}
}
