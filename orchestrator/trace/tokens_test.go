package trace

import "testing"

// The counts are those that the vocabulary's authors publish for these texts.
func TestCountTokens(t *testing.T) {
	for text, want := range map[string]int{
		"":                             0,
		"hello world":                  2,
		"tiktoken is great!":           6,
		"antidisestablishmentarianism": 6,
		"2 + 2 = 4":                    7,
		"お誕生日おめでとう":                    9,
	} {
		if got := tokensOf(t, text); got != want {
			t.Errorf("%q has %d tokens, want %d", text, got, want)
		}
	}
}
