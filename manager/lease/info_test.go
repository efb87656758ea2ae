package lease

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/test/lib/testenv"
)

func TestDescriber(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "devices")
	testenv.Must(t, os.Mkdir(dir, 0o700))
	const text = `{"uuid": "GPU-1", "index": "3", "model": "M", "profile": "1g.10gb", "memoryBytes": 1, "x": {"a": [1]}}`
	for name, data := range map[string]string{
		"GPU-1.json": text, "broken.json": text[:20], "empty.json": "", "list.json": "[1]", "types.json": `{"model": 1}`,
		"negative.json": `{"memoryBytes": -1}`, "huge.json": text + strings.Repeat(" ", maxInfo), ".hidden.json": text,
		"../outside.json": text, "a b.json": text, "null.json": "null",
	} {
		testenv.Must(t, os.WriteFile(filepath.Join(dir, name), []byte(data), 0o600))
	}
	testenv.Must(t, unix.Mkfifo(filepath.Join(dir, "fifo.json"), 0o600)) // nobody writes to it
	testenv.Must(t, os.Mkdir(filepath.Join(dir, "dir.json"), 0o700))
	describe := Describer(dir)
	known := Info{UUID: "GPU-1", Index: "3", Model: "M", Profile: "1g.10gb", MemoryBytes: 1}
	for name, c := range map[string]struct {
		id   string
		want Info
	}{
		"a device":                       {"GPU-1", known},
		"a replica":                      {"GPU-1::3", known},
		"no file":                        {"GPU-2", Info{}},
		"no ID":                          {"", Info{}},
		"an ID with no name":             {"::1", Info{}},
		"a path up":                      {"../outside", Info{}},
		"an absolute path":               {filepath.Join(dir, "GPU-1"), Info{}},
		"a hidden file":                  {".hidden", Info{}},
		"a blank":                        {"a b", Info{}},
		"a NUL":                          {"GPU-1\x00", Info{}},
		"a line's end":                   {"GPU-1\n", Info{}},
		"a long name":                    {strings.Repeat("a", 5000), Info{}},
		"broken JSON":                    {"broken", Info{}},
		"an empty file":                  {"empty", Info{}},
		"JSON of another type":           {"list", Info{}},
		"null":                           {"null", Info{}},
		"a field of another type":        {"types", Info{}},
		"less than no memory":            {"negative", Info{}},
		"a file that is too large":       {"huge", Info{}},
		"a FIFO, to which nobody writes": {"fifo", Info{}},
		"a directory":                    {"dir", Info{}},
	} {
		t.Run(name, func(t *testing.T) {
			if got := describe(c.id); got != c.want {
				t.Errorf("%+v, want %+v", got, c.want)
			}
		})
	}
	if got := Describer(filepath.Join(dir, "none"))("GPU-1"); got != (Info{}) {
		t.Errorf("without a directory: %+v", got)
	}
}

func TestUsedBy(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "devices")
	testenv.Must(t, os.Mkdir(dir, 0o700))
	at := time.Unix(1_700_000_000, 0)
	for name, text := range map[string]string{
		"GPU-1.use": `{"reason": "process 7 uses it", "pids": [7]}`, "bell.use": `{"reason": "a\u0007b\nc\n"}`,
		"huge.use": `{"reason": "` + strings.Repeat("x", maxUse) + `"}`, "empty.use": "", "text.use": "process 7 uses it",
		"../outside.use": `{"reason": "x"}`,
	} {
		path := filepath.Join(dir, name)
		testenv.Must(t, os.WriteFile(path, []byte(text), 0o600), os.Chtimes(path, at, at))
	}
	usedBy := UsedBy(dir)
	for id, want := range map[string]string{
		"GPU-1": "process 7 uses it", "GPU-1::3": "process 7 uses it", "GPU-2": "", "": "", "../outside": "", "huge": "",
		"empty": "", "text": "", "bell": "a\ufffdb c",
	} {
		got := usedBy(id)
		if got.Reason != want || want != "" && !got.Since.Equal(at) || len(got.PIDs) > 0 != (want == "process 7 uses it") {
			t.Errorf("%q is used by %+v, want %q since %v", id, got, want, at)
		}
	}
}
