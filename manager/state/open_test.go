package state_test

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/internal/trust"
	"gpu-cdi-plugin/manager/state"
	"gpu-cdi-plugin/test/lib/testenv"
)

func expectError(t *testing.T, err, want error, text string) {
	t.Helper()
	if err == nil || want != nil && !errors.Is(err, want) || !strings.Contains(err.Error(), text) {
		t.Errorf("the error is %q, want %v with %q", err, want, text)
	}
}

// makeFile makes the file of ten pods.
func makeFile(t *testing.T) (path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "placements.json")
	s, _ := open(t, path)
	put(t, s, placements(10)...)
	closed(t, s)
	return path
}

func TestAFileThatDoesNotVerifyIsSetAside(t *testing.T) {
	for name, c := range map[string]struct {
		damage func(string) string
		reason string
	}{
		"it is empty":       {func(string) string { return "" }, "it is cut short"},
		"it is cut short":   {func(s string) string { return s[:len(s)/2] }, "its checksum does not match"},
		"it has zeros":      {func(s string) string { return strings.Repeat("\x00", len(s)) }, "its checksum does not match"},
		"it has other JSON": {func(string) string { return "{}" }, "it is cut short"},
		"a byte of an ID differs": {
			func(s string) string { return strings.Replace(s, "GPU-3", "GPU-7", 1) }, "its checksum does not match",
		},
		"a placement is missing": {
			func(s string) string { return cutLine(s, "GPU-3") }, "its checksum does not match",
		},
		"two pods have one UID": {
			func(s string) string { return sign(strings.ReplaceAll(s, "000000000003", "000000000004")) },
			"a pod has no UID, or the UID of another pod",
		},
		"a pod has no UID": {
			func(string) string { return sign(`{"state": {"version": 1, "placements": [{}]}}`) },
			"a pod has no UID, or the UID of another pod",
		},
		"a placement is no object": {
			func(string) string { return sign(`{"state": {"version": 1, "placements": [1]}}`) }, "cannot unmarshal",
		},
	} {
		t.Run(name, func(t *testing.T) {
			path := makeFile(t)
			damaged, previous := c.damage(readFile(t, path)), readFile(t, path+".previous")
			testenv.Must(t, os.WriteFile(path, []byte(damaged), 0o600))
			var log bytes.Buffer
			s, loaded, err := state.Open(path, slog.New(slog.NewTextHandler(&log, nil)))
			testenv.Must(t, err)
			defer s.Close()
			if loaded.Loss == nil || !strings.Contains(loaded.Loss.Reason, c.reason) || len(loaded.Placements) > 0 {
				t.Fatalf("loaded %+v, want a loss with the reason %q", loaded, c.reason)
			}
			if !strings.Contains(log.String(), "the placements are lost") ||
				!strings.Contains(log.String(), loaded.Loss.File) {
				t.Errorf("the log is %q", log.String())
			}
			if readFile(t, loaded.Loss.File) != damaged || readFile(t, loaded.Loss.File+".previous") != previous {
				t.Error("the files that were set aside have another content")
			}
			expectLossStays(t, s, path, loaded)
		})
	}
}

// expectLossStays checks that restarts keep the loss until it is cleared.
func expectLossStays(t *testing.T, s *state.Store, path string, want state.Loaded) {
	t.Helper()
	put(t, s, placement(20))
	closed(t, s)
	want.Placements = append(want.Placements, placement(20))
	s, got := open(t, path)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("after the restart (-want +got):\n%s", diff)
	}
	testenv.Must(t, s.SetLoss(nil))
	closed(t, s)
	if _, got = open(t, path); got.Loss != nil {
		t.Errorf("the loss was cleared, and after a restart it is %+v", got.Loss)
	}
}

// cutLine removes the line with a text.
func cutLine(s, text string) string {
	at := strings.Index(s, text)
	begin := strings.LastIndexByte(s[:at], '\n')
	return s[:begin] + s[at+strings.IndexByte(s[at:], '\n'):]
}

// sign gives the state of a file its checksum.
func sign(s string) string {
	_, s, _ = strings.Cut(s, `"state": `)
	s = strings.TrimSuffix(strings.TrimSpace(s), "}")
	return fmt.Sprintf("{\"checksum\": \"%x\", \"state\": %s}\n", sha256.Sum256([]byte(s)), s)
}

func TestASecondDamagedFileDoesNotReplaceTheFirst(t *testing.T) {
	path := makeFile(t)
	files := map[string]bool{}
	for i := range 3 {
		testenv.Must(t, os.WriteFile(path, fmt.Append(nil, i), 0o600))
		s, loaded := open(t, path)
		closed(t, s)
		files[loaded.Loss.File] = true
		if got := readFile(t, loaded.Loss.File); got != fmt.Sprint(i) {
			t.Errorf("the file that was set aside has %q", got)
		}
	}
	if len(files) != 3 {
		t.Errorf("the files that were set aside are %v", files)
	}
}

func TestTheFileOfAnEarlierVersionIsNotIgnored(t *testing.T) {
	dir, elsewhere := t.TempDir(), filepath.Join(t.TempDir(), "elsewhere.db")
	testenv.Must(t, os.WriteFile(elsewhere, nil, 0o600))
	_, loaded, err := state.Open(filepath.Join(dir, "other.json"), slog.New(slog.DiscardHandler), "/absent", elsewhere)
	if err != nil || loaded.Loss == nil || loaded.Loss.File != elsewhere {
		t.Errorf("loaded %+v, error %v, want the loss of %s", loaded, err, elsewhere)
	}
	old := filepath.Join(dir, state.OldName)
	testenv.Must(t, os.WriteFile(old, []byte("bbolt"), 0o600))
	s, loaded := open(t, filepath.Join(dir, "placements.json"))
	if loaded.Loss == nil || loaded.Loss.File != old {
		t.Errorf("loaded %+v, want the loss of %s", loaded, old)
	}
	if got := readFile(t, old); got != "bbolt" {
		t.Errorf("the old file has %q", got)
	}
	testenv.Must(t, s.SetLoss(nil))
	closed(t, s)
	if _, loaded = open(t, filepath.Join(dir, "placements.json")); loaded.Loss != nil {
		t.Errorf("the loss was cleared, and after a restart it is %+v", loaded.Loss)
	}
}

// What is no damaged state is left as it is.
func TestOpenRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		prepare func(t *testing.T, path string) error
		want    error
		text    string
	}{
		"a directory": {
			func(_ *testing.T, path string) error { return errors.Join(os.Remove(path), os.Mkdir(path, 0o755)) },
			nil, "is a directory, not a regular file",
		},
		"a FIFO": {
			func(_ *testing.T, path string) error {
				return errors.Join(os.Remove(path), syscall.Mkfifo(path, 0o600))
			},
			nil, "is a FIFO, not a regular file",
		},
		"a symbolic link": {
			func(_ *testing.T, path string) error {
				return errors.Join(os.Rename(path, path+".other"), os.Symlink("placements.json.other", path))
			},
			syscall.ELOOP, "",
		},
		"another user's file": {
			func(t *testing.T, path string) error {
				testenv.Root(t)
				return os.Chown(path, 1000, 0)
			},
			trust.ErrUnsafe, "placements.json belongs to user 1000",
		},
		"a file that others can write": {
			func(_ *testing.T, path string) error { return os.Chmod(path, 0o606) },
			trust.ErrUnsafe, "every user can write to",
		},
		"a directory that others can write": {
			func(_ *testing.T, path string) error { return os.Chmod(filepath.Dir(path), 0o777) },
			trust.ErrUnsafe, "every user can write to",
		},
		"a file of a newer version": {
			func(_ *testing.T, path string) error {
				return os.WriteFile(path, []byte(sign(`{"state": {"version": 2, "placements": "none"}}`)), 0o600)
			},
			state.ErrNewer, "its format is 2",
		},
		"a missing directory": {
			func(_ *testing.T, path string) error { return os.RemoveAll(filepath.Dir(path)) }, fs.ErrNotExist, "",
		},
	} {
		t.Run(name, func(t *testing.T) {
			path := makeFile(t)
			testenv.Must(t, c.prepare(t, path))
			before := snapshot(t, filepath.Dir(path))
			_, _, err := state.Open(path, slog.New(slog.DiscardHandler))
			expectError(t, err, c.want, c.text)
			if err != nil && !strings.HasPrefix(err.Error(), "open the state "+path+": ") {
				t.Errorf("the error is %q", err)
			}
			if diff := cmp.Diff(before, snapshot(t, filepath.Dir(path))); diff != "" {
				t.Errorf("the directory (-before +after):\n%s", diff)
			}
		})
	}
}

// snapshot returns the modes and the contents of a directory's files.
func snapshot(t *testing.T, dir string) map[string]string {
	t.Helper()
	files := map[string]string{}
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	for _, e := range entries {
		files[e.Name()] = e.Type().String()
		if e.Type().IsRegular() {
			files[e.Name()] += readFile(t, filepath.Join(dir, e.Name()))
		}
	}
	return files
}
