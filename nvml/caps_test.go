package nvml

import (
	"strings"
	"testing"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/test/lib/testenv"
)

const someMinors = "config 1\nmonitor 2\ngpu0/gi0/access 3\ngpu0/gi0/ci0/access 4\n\ngpu2/gi11/ci1/access 1013\n"

func TestCapMinors(t *testing.T) {
	caps, err := parseCapMinors(someMinors)
	testenv.Must(t, err)
	for name, c := range map[string]struct{ got, want int }{
		"a GPU instance":                        {caps.minor("gpu%d/gi%d/access", 0, 0), 3},
		"a compute instance":                    {caps.minor("gpu%d/gi%d/ci%d/access", 0, 0, 0), 4},
		"ids of two digits":                     {caps.minor("gpu%d/gi%d/ci%d/access", 2, 11, 1), 1013},
		"an instance that is not in the file":   {caps.minor("gpu%d/gi%d/access", 2, 11), gpu.NoMinor},
		"an instance of a GPU that has none":    {caps.minor("gpu%d/gi%d/access", 1, 0), gpu.NoMinor},
		"a compute instance that is not listed": {caps.minor("gpu%d/gi%d/ci%d/access", 0, 0, 1), gpu.NoMinor},
	} {
		if c.got != c.want {
			t.Errorf("%s: got %d, want %d", name, c.got, c.want)
		}
	}
}

func TestCapMinorsRefuses(t *testing.T) {
	for name, text := range map[string]string{
		"a name without a number":             "config 1\ngpu0/gi0/access\n",
		"three fields":                        "gpu0/gi0/access 3 4\n",
		"a negative minor":                    "config -1\n",
		"a minor that the kernel cannot have": "config 1048576\n",
		"a minor in hexadecimal":              "config 0x1\n",
	} {
		t.Run(name, func(t *testing.T) {
			if got, err := parseCapMinors(text); err == nil {
				t.Errorf("got %v, want an error", got)
			}
		})
	}
}

func TestReadCapMinorsNamesTheFile(t *testing.T) {
	h := createHost(t, map[string]string{"proc/driver/nvidia-caps/mig-minors": "config one\n"})
	_, err := readCapMinors(h)
	if err == nil || !strings.Contains(err.Error(), "mig-minors") || !strings.Contains(err.Error(), "line 1") {
		t.Errorf("got the error %v, want one with the file and the line", err)
	}
}

func TestReadCapMinorsOfAHostWithoutMIG(t *testing.T) {
	caps, err := readCapMinors(createHost(t, nil))
	if err != nil || len(caps) != 0 {
		t.Errorf("got %v and error %v, want none", caps, err)
	}
}

func FuzzCapMinors(f *testing.F) {
	f.Add(someMinors)
	f.Add("gpu0/gi0/access")
	f.Fuzz(func(t *testing.T, text string) {
		got, err := parseCapMinors(text)
		if (got == nil) == (err == nil) {
			t.Fatalf("got %v and error %v, want exactly one", got, err)
		}
		for name, minor := range got {
			if name == "" || minor < 0 || minor >= 1<<20 {
				t.Errorf("%q has minor %d", name, minor)
			}
		}
	})
}
