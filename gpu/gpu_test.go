package gpu

import (
	"encoding/json"
	"regexp"
	"strings"
	"testing"

	"gpu-cdi-plugin/test/lib/testenv"

	"github.com/google/go-cmp/cmp"
)

func TestNormalizePCIBusID(t *testing.T) {
	for name, c := range map[string]struct{ id, want string }{
		"NVML's long form":                     {"00000000:1B:00.0", "0000:1b:00.0"},
		"NVML's old form":                      {"0000:1B:00.0", "0000:1b:00.0"},
		"the form of sysfs":                    {"0000:1b:00.0", "0000:1b:00.0"},
		"spaces around":                        {" 0000:1b:00.0\n", "0000:1b:00.0"},
		"a domain that needs more digits":      {"00010000:01:00.0", "10000:01:00.0"},
		"the largest domain":                   {"FFFFFFFF:ff:1f.7", "ffffffff:ff:1f.7"},
		"a device and a function that are set": {"0000:ff:1f.7", "0000:ff:1f.7"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := NormalizePCIBusID(c.id)
			if err != nil || got != c.want {
				t.Errorf("NormalizePCIBusID(%q) = %q, %v, want %q", c.id, got, err, c.want)
			}
		})
	}
}

func TestNormalizePCIBusIDRefuses(t *testing.T) {
	for name, id := range map[string]string{
		"nothing":                           "",
		"no domain":                         "1b:00.0",
		"an empty domain":                   ":1b:00.0",
		"a domain of three digits":          "000:1b:00.0",
		"a domain of nine digits":           "000000000:1b:00.0",
		"a domain with a sign":              "+000:1b:00.0",
		"a domain with an underscore":       "00_0:1b:00.0",
		"a bus with a sign":                 "0000:+b:00.0",
		"a bus with a space":                "0000: b:00.0",
		"a device that PCI does not have":   "0000:1b:20.0",
		"a function that PCI does not have": "0000:1b:00.8",
		"no function":                       "0000:1b:00",
		"more behind":                       "0000:1b:00.00",
		"a path":                            "0000:1b:00.0/../x",
		"a letter behind F":                 "0000:1g:00.0",
	} {
		t.Run(name, func(t *testing.T) {
			if got, err := NormalizePCIBusID(id); err == nil {
				t.Errorf("NormalizePCIBusID(%q) = %q, want an error", id, got)
			}
		})
	}
}

func FuzzNormalizePCIBusID(f *testing.F) {
	sysfs := regexp.MustCompile(`^[0-9a-f]{4,8}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]$`)
	f.Add("00000000:1B:00.0")
	f.Add("0000:+b:00.0")
	f.Fuzz(func(t *testing.T, id string) {
		got, err := NormalizePCIBusID(id)
		if (got == "") == (err == nil) {
			t.Fatalf("NormalizePCIBusID(%q) = %q and error %v, want exactly one", id, got, err)
		}
		if err != nil {
			return
		}
		if !sysfs.MatchString(got) {
			t.Errorf("NormalizePCIBusID(%q) = %q, which sysfs would not write", id, got)
		}
		if again, err := NormalizePCIBusID(got); err != nil || again != got {
			t.Errorf("NormalizePCIBusID(%q) = %q, %v, want it unchanged", got, again, err)
		}
	})
}

func TestPCIePathTextAndBack(t *testing.T) {
	for p := PathUnknown; p <= PathSameBoard; p++ {
		text, err := p.MarshalText()
		testenv.Must(t, err)
		var got PCIePath
		if err := got.UnmarshalText(text); err != nil || got != p {
			t.Errorf("%s came back as %s, error %v", p, got, err)
		}
	}
}

func TestPCIePathRefusesUnknownNames(t *testing.T) {
	p := PathNode
	err := p.UnmarshalText([]byte("node"))
	if err == nil || !strings.Contains(err.Error(), "NODE") || p != PathNode {
		t.Errorf("got %s and error %v, want an error that lists the names", p, err)
	}
}

func TestPCIePathOutOfRange(t *testing.T) {
	for _, p := range []PCIePath{-1, PathSameBoard + 1} {
		if got := p.String(); !strings.HasPrefix(got, "PCIePath(") {
			t.Errorf("PCIePath %d is %q", int(p), got)
		}
	}
}

func TestLinkString(t *testing.T) {
	for want, link := range map[string]Link{
		"NV18":    {PCIe: PathSystem, NVLinks: 18, Switched: true},
		"PIX":     {PCIe: PathSingleSwitch},
		"unknown": {},
	} {
		if got := link.String(); got != want {
			t.Errorf("%+v is %q, want %q", link, got, want)
		}
	}
}

func TestSnapshotLink(t *testing.T) {
	s := &Snapshot{Links: []Link{{A: 0, B: 1, NVLinks: 4}, {A: 0, B: 3}, {A: 1, B: 3, NVLinks: 2}}}
	for name, c := range map[string]struct {
		a, b  int
		want  Link
		found bool
	}{
		"in order":                  {0, 1, Link{A: 0, B: 1, NVLinks: 4}, true},
		"the other way round":       {3, 1, Link{A: 1, B: 3, NVLinks: 2}, true},
		"a GPU that is not linked":  {1, 2, Link{}, false},
		"a GPU with itself":         {1, 1, Link{}, false},
		"a GPU that does not exist": {3, 9, Link{}, false},
	} {
		t.Run(name, func(t *testing.T) {
			got, ok := s.Link(c.a, c.b)
			if ok != c.found || got != c.want {
				t.Errorf("Link(%d, %d) = %+v, %v, want %+v, %v", c.a, c.b, got, ok, c.want, c.found)
			}
		})
	}
}

// The names are an interface: `devices -o json` prints them.
func TestDeviceJSON(t *testing.T) {
	got, err := json.Marshal(Device{
		UUID: "GPU-1", NUMANode: NoNUMANode, Minor: 2,
		MIG: []MIGDevice{{UUID: "MIG-1", Profile: "1g.10gb", GPUInstanceCap: 30}},
	})
	testenv.Must(t, err)
	want := `{"index":0,"uuid":"GPU-1","name":"","minor":2,"pciBusID":"","numaNode":-1,"memoryBytes":0,` +
		`"computeCapability":"","pciClass":"","fabricClique":"","migCapable":false,"migEnabled":false,` +
		`"mig":[{"index":0,"uuid":"MIG-1","profile":"1g.10gb","gpuInstance":0,` +
		`"computeInstance":0,"gpuInstanceCap":30,"computeInstanceCap":0,"memoryBytes":0,` +
		`"attributes":{"multiprocessors":0,"gpuSlices":0,"computeSlices":0,"copyEngines":0,"decoders":0,"encoders":0,` +
		`"jpegEngines":0,"ofaEngines":0}}]}`
	if diff := cmp.Diff(want, string(got)); diff != "" {
		t.Errorf("JSON (-want +got):\n%s", diff)
	}
	var back Device
	if err := json.Unmarshal(got, &back); err != nil || back.MIG[0].GPUInstanceCap != 30 || !back.Usable() {
		t.Errorf("came back as %+v, error %v", back, err)
	}
}

func TestIsUUID(t *testing.T) {
	for text, want := range map[string]bool{
		"6ba7b810-9dad-11d1-80b4-00c04fd430c8":     true,
		"6BA7B810-9DAD-11D1-80B4-00C04FD430C8":     true,
		"":                                         false,
		"6ba7b8109dad11d180b400c04fd430c8":         false,
		"6ba7b810-9dad-11d1-80b4-00c04fd430c8-":    false,
		"6ba7b810-9dad-11d1-80b4-00c04fd430c":      false,
		"6ba7b81-09dad-11d1-80b4-00c04fd430c8":     false,
		"????????-????-????-????-????????????":     false,
		"GPU-6ba7b810-9dad-11d1-80b4-00c04fd430c8": false,
	} {
		if got := IsUUID(text); got != want {
			t.Errorf("%q: %v, want %v", text, got, want)
		}
	}
}
