package sdnotify

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
)

// The tests of cmd/device-manager pass sockets.
func TestSocketsThatAreNotPassed(t *testing.T) {
	own := fmt.Sprintf("LISTEN_PID=%d", os.Getpid())
	for name, c := range map[string]struct {
		env  []string
		want string
	}{
		"no variable":                      {nil, ""},
		"those of another process":         {[]string{"LISTEN_PID=1", "LISTEN_FDS=1"}, ""},
		"those of a process without a PID": {[]string{"LISTEN_FDS=1"}, ""},
		"no sockets":                       {[]string{own, "LISTEN_FDS=0"}, ""},
		"no number of sockets":             {[]string{own}, ""},
		"a negative number":                {[]string{own, "LISTEN_FDS=-1"}, `systemd passes "-1" sockets`},
		"too many sockets":                 {[]string{own, "LISTEN_FDS=17"}, `systemd passes "17" sockets`},
		"a number that is none":            {[]string{own, "LISTEN_FDS=x"}, `systemd passes "x" sockets`},
		"the last value of several":        {[]string{own, "LISTEN_FDS=1", "LISTEN_FDS=0"}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			files, err := Sockets(c.env)
			if files != nil || (err == nil) != (c.want == "") || err != nil && !strings.HasPrefix(err.Error(), c.want) {
				t.Errorf("%v, error %v; want the error %q", files, err, c.want)
			}
		})
	}
}

func TestForChild(t *testing.T) {
	env := []string{
		"PATH=/bin", "NOTIFY_SOCKET=@x", "WATCHDOG_USEC=1", "WATCHDOG_PID=2", "LISTEN_PID=3", "LISTEN_FDS=1",
		"LISTEN_FDNAMES=x", "LISTENER=y", "NOTIFY_SOCKET_DIR=z",
	}
	if got, want := ForChild(env), []string{"PATH=/bin", "LISTENER=y", "NOTIFY_SOCKET_DIR=z"}; !slices.Equal(got, want) {
		t.Errorf("%s, want %s", strings.Join(got, " "), strings.Join(want, " "))
	}
}
