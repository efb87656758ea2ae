package gpu

import "testing"

func TestArchitecture(t *testing.T) {
	for capability, want := range map[string]string{
		"7.0": "Volta", "7.5": "Turing", "8.0": "Ampere", "8.6": "Ampere", "8.9": "Ada Lovelace", "9.0": "Hopper",
		"10.3": "Blackwell", "12.0": "Blackwell", "13.0": "Rubin", "99.0": "", "": "",
	} {
		if got := (&Device{ComputeCapability: capability}).Architecture(); got != want {
			t.Errorf("%q: %q, want %q", capability, got, want)
		}
	}
}
