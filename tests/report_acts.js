// What test_report.py does with the page in a browser. Each function returns what it has seen.

const all = selector => [...document.querySelectorAll(selector)];
const text = selector => document.querySelector(selector).textContent;
const title = selector => document.querySelector(selector).title.replace(/id \d+/, "id N");

function open() {
  const seen = {};
  const select = document.querySelector("select");
  seen["legend"] = text("#viewer").split("\n")[3].trim();
  seen["question"] = text("#task h2");
  seen["sampled text"] = all("#episode > :first-child .sampled").map(token => token.textContent).join("");
  seen["calls"] = all("#episode > :last-child > .block").length;
  seen["opened"] = text("#siblings h3");
  seen["siblings"] = all("#siblings button").map(card => [...card.children].map(line => line.textContent).join("; "));
  seen["titles"] = [".structural", ":not(.structural)"].map(style => title(`#episode .sampled${style}`));
  const curve = document.querySelector("img.step"), [left, right] = DATA.sections["While training"].groups[""][0].edges;
  const x = curve.getBoundingClientRect().left + curve.width * (8 - left) / (right - left);
  curve.dispatchEvent(new MouseEvent("click", {clientX: x}));
  seen["click at step 8: the nearest"] = [text("#siblings h3"), select.value];
  select.focus();
  select.value = 30;  // as the arrow keys do
  select.dispatchEvent(new Event("change"));
  seen["arrow key"] = [text("#siblings h3"), document.activeElement.id];
  all("#siblings button")[1].click();
  seen["chosen"] = text("#siblings .chosen");
  seen["table"] = all("tr").map(row => [...row.children].map(cell => cell.textContent).join(" | "));
  return seen;
}

// A structural token's color and background at many advantages.
function tint() {
  const numbers = color => color.match(/[\d.]+/g).map(Number);
  const seen = {colors: []};
  for (let advantage = -6; advantage <= 6; advantage += 0.25) {
    const node = token({text: "</think>", style: "sampled structural", fact: "", advantage});
    document.body.append(node);
    const style = getComputedStyle(node);
    seen.colors.push([numbers(style.color), numbers(style.backgroundColor)]);
    seen.looks = [style.fontWeight, style.textDecorationLine];
  }
  return seen;
}
