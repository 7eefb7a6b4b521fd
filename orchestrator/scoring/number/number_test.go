package number

import (
	"math/big"
	"strings"
	"testing"
)

func TestLast(t *testing.T) {
	for text, want := range map[string]string{
		"":                                     "none",
		"no digits":                            "none",
		"The answer is 42.":                    "42",
		"first 1, then 2":                      "2",
		"1,234,567.50 dollars":                 "2469135/2",
		"1,23":                                 "23",
		"1,2345":                               "2345",
		"1{,}000":                              "1000",
		`12\,345`:                              "12345",
		"1234,567":                             "567",
		"3/4":                                  "3/4",
		"x = -3/4.":                            "-3/4",
		"1 1/2":                                "1/2",
		"on 2024/05/06":                        "6",
		"5/0":                                  "0",
		`\frac{1}{3}`:                          "1/3",
		`-\dfrac{-1}{3}`:                       "1/3",
		`\frac{1}{0}`:                          "0",
		`\frac{x}{2}`:                          "2",
		"10-5":                                 "5",
		"(3)-5":                                "5",
		"x=-5":                                 "-5",
		"\u22127":                              "-7",
		"+7":                                   "7",
		".5":                                   "1/2",
		"0.5":                                  "1/2",
		"6.02e3":                               "6020",
		"1E-2":                                 "1/100",
		"5e":                                   "5",
		"5eV":                                  "5",
		"2e3x":                                 "2",
		"50%":                                  "50",
		"$5":                                   "5",
		"5kg":                                  "5",
		"7 and x2":                             "7",
		"7, a_3, H2O":                          "7",
		`so \boxed{12} and 13`:                 "12",
		`\boxed{1} \boxed{\text{is } {2}}`:     "2",
		`\boxed{3} \boxed{4`:                   "3",
		`\boxed{none} 5`:                       "none",
		`\boxed{\frac{2}{4}}`:                  "1/2",
		"7 " + strings.Repeat("9", MaxBytes+1): "7",
	} {
		got := "none"
		if value, ok := Last(text); ok {
			got = value.RatString()
		}
		if got != want {
			t.Errorf("Last(%q) = %s, want %s", text, got, want)
		}
	}
}

func TestParseWantsNothingElse(t *testing.T) {
	for text, want := range map[string]bool{
		" 1,000 ": true, "1/3": true, "-2.5e3": true, `\frac{1}{2}`: true,
		"": false, "1 2": false, "5%": false, "x": false, "1/0": false, "--1": false, "NaN": false, "Inf": false, "0x10": false,
	} {
		if _, ok := Parse(text); ok != want {
			t.Errorf("Parse(%q) is %v", text, ok)
		}
	}
}

// FuzzLast holds for any text: no panic, and a number that is written behind it
// is found again.
func FuzzLast(f *testing.F) {
	for _, text := range []string{"1,000", `\boxed{\frac{1}{2}`, "-.5e-", "\u22121/2/3", "1e999"} {
		f.Add(text, int64(7), int64(3))
	}
	f.Fuzz(func(t *testing.T, text string, above, below int64) {
		Last(text)
		Parse(text)
		if below == 0 || strings.Contains(text, `\boxed{`) {
			return
		}
		want := big.NewRat(above, below)
		got, ok := Last(text + "\n = " + want.RatString())
		if !ok || got.Cmp(want) != 0 {
			t.Errorf("%q and then %s gives %v", text, want.RatString(), got)
		}
	})
}
