package prepare

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/test/lib/testenv"
)

func TestUserName(t *testing.T) {
	const users = "root:x:0:0:root:/root:/bin/sh\n# 1000\nshort:x\n\n+::::::\n" +
		"alice:x:1000:1000::/:/bin/sh\nbob:x:1000:1000::/:/bin/sh"
	for name, c := range map[string]struct {
		passwd    string
		uid, want string
	}{
		"a user":                       {users, "1000", "alice"},
		"root":                         {users, "0", "root"},
		"a number of a group":          {"alice:x:1:1000::/:", "1000", ""},
		"a user whom the host lacks":   {users, "1001", ""},
		"no file":                      {"", "0", ""},
		"a file that is too large":     {users + strings.Repeat("\n", maxPasswd), "0", ""},
		"a user in the last line only": {"alice:x:1000:1000::/:/bin/sh", "1000", "alice"},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			if c.passwd != "" {
				testenv.Must(t, os.Mkdir(filepath.Join(root, "etc"), 0o755),
					os.WriteFile(filepath.Join(root, "etc", "passwd"), []byte(c.passwd), 0o600))
			}
			h, err := host.New(root, "", "")
			testenv.Must(t, err)
			if got := userName(h, c.uid); got != c.want {
				t.Errorf("%q, want %q", got, c.want)
			}
		})
	}
	root := t.TempDir()
	testenv.Must(t, os.Mkdir(filepath.Join(root, "etc"), 0o755), unix.Mkfifo(filepath.Join(root, "etc", "passwd"), 0o600))
	h, err := host.New(root, "", "")
	testenv.Must(t, err)
	if got := userName(h, "0"); got != "" {
		t.Errorf("of a FIFO to which nobody writes: %q", got)
	}
}
